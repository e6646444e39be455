"""Runs steps: executor, lanes, optimizer step, ZeRO, offloading, aborts."""
