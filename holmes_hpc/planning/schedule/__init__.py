"""Pipeline schedules: the passes and transfers of each stage, their dependencies, and the time of a step."""
