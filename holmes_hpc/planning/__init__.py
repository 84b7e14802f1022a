"""The planner: pure functions that choose nodes, stages, layers per stage, and each process group's transport."""
