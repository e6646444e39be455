"""The driver: checks, placement and the step loop."""
