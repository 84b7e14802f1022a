"""Slurm's commands and texts: the only room that runs them; parsers, host lists, configuration."""
