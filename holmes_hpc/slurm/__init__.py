"""Slurm's commands, which only this package runs, with parsers, host lists and job states."""
