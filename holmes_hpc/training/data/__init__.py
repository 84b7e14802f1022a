"""Training data: preparing data sets, reading them, and the order of samples."""
