"""The site's hardware: NICs, nodes and fabrics, from Slurm's features or probed."""
