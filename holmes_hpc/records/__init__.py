"""The run directory: what is in its files, how they are read and written, files that are never half-written."""
