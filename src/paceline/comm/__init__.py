"""Communication over any process group: launch a collective, wait for it, detect lost ranks. Imports no torch."""

BACKEND_NAME = "paceline"  # under which c10d knows our own backend
OWN_GROUPS = "paceline/"  # how names of groups begin that Paceline opens for itself
TOKEN = "PACELINE_TOKEN"  # noqa: S105  the variable's name
"""Environment variable: a secret that all ranks of a job share. `paceline run` makes one where there is one machine."""
SERVERS = "PACELINE_SERVERS"
"""Environment variable: addresses of parameter servers, `host:port,host:port`. `paceline run --servers` sets it."""
