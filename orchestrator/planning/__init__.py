"""From a configuration to a plan: memory, traffic and time."""
