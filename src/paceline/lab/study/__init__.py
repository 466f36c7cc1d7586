"""Ranks in one process, for the large-batch study."""
