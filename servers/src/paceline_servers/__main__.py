"""`python -m paceline_servers`, as `paceline run --servers` starts it."""

from paceline_servers.process import main

main()
