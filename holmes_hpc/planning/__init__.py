"""The planner: pure functions that choose nodes, stages, layers and every transport."""
