"""What a step was like: its line of metrics, where its time went, its timeline, loggers."""
