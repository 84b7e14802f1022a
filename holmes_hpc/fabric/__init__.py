"""The site's hardware: NICs, GPUs, nodes and fabrics, from Slurm's features or probed. GPU peaks: gpu_kinds.yaml."""
