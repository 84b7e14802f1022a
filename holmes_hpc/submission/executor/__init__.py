"""The executor that adds heterogeneous jobs to submitit: requests, checks, batch scripts, submission and job states."""
