"""Pipeline parallelism: schedules, the transfers between stages, and their encoding."""
