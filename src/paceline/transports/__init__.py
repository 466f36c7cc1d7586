"""MOVE messages between ranks: through memory they share, through a c10d group, or within one process for tests."""
