"""Is it faster here, and how far from the limit? Benchmarks against torch's DDP and other libraries.

`protocol` says how everything is measured, `sides` and `allreduce_sides` who is compared, `ranks` where the ranks run;
`step` and `allreduce` measure, `step_report` and `allreduce_report` tell. What is trained is in
`paceline_lab.workloads`.
"""
