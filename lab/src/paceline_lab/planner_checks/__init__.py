"""What the product's planner is checked by, and what only measurements ask: Zou's minibatches, least step times."""
