"""A launch that outlives its ranks: `paceline run --min-ranks`. One agent a host; what they decide is a `Plan`."""
