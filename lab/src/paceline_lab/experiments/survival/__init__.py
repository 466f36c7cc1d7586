"""Does training outlive its ranks? A small training, faults at chosen moments, and what must hold afterwards."""
