"""`pentad doctor`: checks of a machine or of the nodes of a cluster, each with a verdict and a remedy."""
