"""What a run shows: terminal, run folder, metrics and dashboards."""
