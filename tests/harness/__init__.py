"""The helpers that tests share: ranks, commands, models, programs, clusters."""
