"""The tasks of a training job: meet the other ranks, build a part of the model, train and record."""

import os

# Cluster nodes often have no reverse DNS entry, and torch prints several lines about each. Errors are still shown.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch compiles a few small kernels. By default, each rank would start up to 32 processes for this and wait for them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A gloo group reads the addresses of its ranks by one request to the store, instead of two per rank.
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
