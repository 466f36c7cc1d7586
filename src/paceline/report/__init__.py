"""Views of a run's records for people: a timeline of all ranks, and a page with the verdict first."""
