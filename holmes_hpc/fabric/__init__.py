"""What the site has: NICs, nodes and fabrics, from Slurm's features or probed."""
