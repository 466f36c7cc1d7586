"""What a run's records look like to people: a timeline of all ranks, and a page with the verdict first."""
