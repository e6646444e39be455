"""`pentad plan --search`: the fastest of all plans of a configuration on a number of GPUs."""
