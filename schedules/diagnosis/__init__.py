"""What a step's time went into, what would shorten it, and which rank is slow."""
