"""What each task of a job does: one process, one rank; the training loop is on top."""

import os

# torch warns, several lines each, that nodes of a cluster have no reverse DNS entry; errors still come through
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
