"""Runs steps: executor, optimizer step, ZeRO, offloading, a rank's state and its transfer."""
