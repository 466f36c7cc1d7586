"""PERFORM a schedule on tensors."""
