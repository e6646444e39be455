"""Process groups, and tensor, context and expert parallelism."""
