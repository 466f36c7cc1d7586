"""Survival of a training whose ranks die: a small training, faults at chosen moments, and what must hold afterwards."""
