"""Faults and spikes: detects them, ends the generation, and puts the ranks together again."""
