"""Pipeline parallelism: schedules, and the transfers between stages with their form on the wire."""
