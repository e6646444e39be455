"""Faults and loss spikes: detects them, ends the generation and regroups the ranks."""
