"""A run that outlives its nodes: an agent on every node forks the ranks, and a coordinator decides which ones."""
