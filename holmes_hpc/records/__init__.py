"""The run directory: its schemas, its readers and writers, locks and file ownership checks."""
