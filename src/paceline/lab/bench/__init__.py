"""Is it faster here, and how far from the limit? Benchmarks against torch's DDP and other peers.

`protocol` says how everything is measured, `workloads` what is trained, `sides` who is compared, `ranks` where
the ranks run; `step` and `allreduce` ask the questions.
"""
