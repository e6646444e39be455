"""Ray: the cluster, placement, and the actors around the workers."""
