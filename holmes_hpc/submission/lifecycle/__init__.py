"""The life of a run: its directory and job, their state and progress, and how and why the run ended."""
