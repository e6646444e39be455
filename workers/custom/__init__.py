"""Models from a user's own torch modules."""
