"""Where a step's time went, what would shorten it, and which ranks are slow."""
