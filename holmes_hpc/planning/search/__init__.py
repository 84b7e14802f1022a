"""Which of all placements is the best: the space of them, candidates, layers, refusals."""
