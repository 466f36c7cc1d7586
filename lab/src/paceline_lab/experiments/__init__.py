"""Experiments: does it hold? Measured claims of Paceline, and figures of papers measured again.

`registry` lists them all, `runner` runs them, `options` has what their command lines share. The folders are
by question: `step` (what a step costs and hides), `reduction` (how long buckets take), `datagrams` (what lost packets
cost), `accuracy` (what large batches and lost gradients cost), `unequal` (unequal machines), `papers` (figures of time
measured again), `prediction` (how far off the simulator is), `kernel_svm`; `fuzz` searches for wrong gradients.
"""
