"""The life of a run: begin, follow, status, outcome, finish."""
