"""Stand-ins for real networks: ranks that are threads of one process, losses by a pattern, groups used in turn."""
