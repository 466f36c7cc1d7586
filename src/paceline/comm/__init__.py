"""The one door to a process group: launch a collective on it, wait for it, and say who is missing. Imports no torch."""

BACKEND_NAME = "paceline"  # under which c10d knows our own backend
