"""State of a run on disk: saving, loading, pruning, and weights exported for Hugging Face."""
