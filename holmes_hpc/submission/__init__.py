"""Submission of plans: jobs on Slurm or on this machine, sweeps of jobs, and the life of each run's job."""
