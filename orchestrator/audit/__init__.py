"""What a run committed, as it can be proven later."""
