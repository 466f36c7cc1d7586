"""`python -m paceline.servers`, as `paceline run --servers` starts it."""

from paceline.servers.process import main

main()
