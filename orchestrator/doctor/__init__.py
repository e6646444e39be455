"""`pentad doctor`: checks of a machine or of a cluster's nodes, each with a verdict and a remedy."""
