"""Hydra configuration groups (data only; Hydra finds them as a package)."""
