"""One process (rank) of a run: who it is, its log, failures, signals, hangs, slow nodes, running without a GPU."""
