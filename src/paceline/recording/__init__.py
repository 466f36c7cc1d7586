"""Writes a run down: what each step of this rank did, from Paceline's reducer or from hooks on torch's DDP."""
