"""How a plan gets to the nodes, and what becomes of its job."""
