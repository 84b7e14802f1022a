"""Search for the best plan: the space of placements, candidates, layers per stage, and errors if no plan exists."""
