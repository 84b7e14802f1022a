"""The tasks of a training job: meet the other ranks, build a part of the model, train and record."""

import os

# Cluster nodes often have no reverse DNS entry, and torch prints several lines about each. Errors are still shown.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# A few small kernels are compiled. By default each rank starts up to 32 processes for it, and waits for their end.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
