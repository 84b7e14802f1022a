"""What every process of a training job does: it meets the others, builds its part of the model, trains and records."""

import os

# torch warns, several lines each, that nodes of a cluster have no reverse DNS entry; errors still come through
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
