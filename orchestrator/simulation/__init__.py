"""Effects on a simulated step beyond its costs: links that operations share, and random deviations."""
