"""The search for the fastest compute order within a memory limit."""
