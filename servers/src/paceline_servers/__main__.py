"""Makes `python -m paceline_servers` run a server, as `paceline run --servers` does."""

from paceline_servers.process import main

main()
