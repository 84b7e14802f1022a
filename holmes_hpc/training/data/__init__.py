"""Text to tokens to samples: preparing data sets, reading them, and the order of samples."""
