"""What each pipeline stage does one after the other, what waits for what, and how long a step takes then."""
