"""When instructions run: CUDA streams with events between them, graphs of what a step repeats, measured times."""
