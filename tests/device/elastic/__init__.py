"""Elastic training on the emulated device while ranks die: the training, the runs of it, and what is left out of it."""
