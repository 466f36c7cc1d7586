"""The studies of two papers, again, on emulated clusters: each beside what was published."""
