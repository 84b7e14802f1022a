"""The measurements of a step: its metrics line, time breakdown, timeline, and loggers."""
