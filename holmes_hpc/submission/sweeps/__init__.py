"""Hydra sweeps of heterogeneous jobs: the launchers, the manifest of a sweep's jobs, their states and results."""
