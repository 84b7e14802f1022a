"""Checkpoints: saving, loading and pruning; import from Hugging Face and export to it."""
