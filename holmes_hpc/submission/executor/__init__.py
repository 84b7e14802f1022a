"""Heterogeneous jobs for submitit: the text of the batch script, preflight, sbatch, states."""
