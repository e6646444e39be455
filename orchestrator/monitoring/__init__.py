"""A run's outputs: terminal, run folder, metrics and dashboards."""
