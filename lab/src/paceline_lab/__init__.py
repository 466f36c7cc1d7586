"""Measures, emulates and studies Paceline: benchmarks, emulated clusters, papers' claims, simulated networks."""
