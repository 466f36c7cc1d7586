"""What is not used while training: benchmarks, studies, emulated clusters, the demo. Nothing below imports it."""
