"""The lines that a run writes: events, metrics, and the proof that each sample counted once."""
