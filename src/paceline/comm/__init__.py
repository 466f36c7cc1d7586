"""Communication over any process group: launch a collective, wait for it, detect lost ranks. Imports no torch."""

BACKEND_NAME = "paceline"  # under which c10d knows our own backend
