"""Runs steps: executor, optimizer step, ZeRO, offloading, aborts."""
