"""Train one large model over clusters that do not share a fast network, under one Slurm."""

__version__ = "0.1.0"
