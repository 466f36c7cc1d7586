"""Benchmarks against torch's DDP and other libraries: is Paceline faster on this machine, and how far from the limit?

`protocol` says how everything is measured. `sides` and `allreduce_sides` list what is compared, and `ranks` starts
the ranks. `step` and `allreduce` measure, `step_report` and `allreduce_report` print and draw. The models are in
`paceline_lab.workloads`.
"""
