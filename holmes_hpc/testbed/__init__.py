"""A real Slurm with shaped NICs on one machine, for trials and tests."""

from holmes_hpc.testbed.testbed import down, env, exec_in, kill_node, nodes, status, up
from holmes_hpc.testbed.topology import Topology

__all__ = ["Topology", "down", "env", "exec_in", "kill_node", "nodes", "status", "up"]
