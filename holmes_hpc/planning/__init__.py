"""What to run where: pure functions that decide nodes, stages, layers and every transport."""
