"""One process (rank) of a run: its launch, log, failures, signals and hangs, slow nodes, and training without a GPU."""
