"""Benchmarks: one question per file, torch's DistributedDataParallel in the same run."""
