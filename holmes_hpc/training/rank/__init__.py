"""One process of a run: who it is, its log, how it fails, signals, watchdog, running without a GPU."""
