"""The run directory: its schemas, its one reader and writer, files that are never half-written."""
