"""The driver: the step loop, and recovery from faults."""
