"""What tests share: ranks, commands, models, programs, clusters."""
