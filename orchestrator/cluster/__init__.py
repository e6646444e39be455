"""Ray: the cluster, placement, and the workers' actors."""
