"""The lines that a run writes: events, metrics, and what proves that each sample counted once."""
