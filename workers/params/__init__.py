"""Parameters, their shards, and the optimizer."""
