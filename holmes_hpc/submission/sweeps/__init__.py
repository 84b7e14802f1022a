"""Hydra sweeps whose jobs are heterogeneous: launcher, manifest, table, results."""
