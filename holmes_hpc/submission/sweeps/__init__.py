"""Hydra sweeps of heterogeneous jobs: launcher, manifest, table, results."""
