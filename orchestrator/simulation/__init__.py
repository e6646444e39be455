"""A step as it is simulated beyond its costs: links that operations share, and deviations."""
