"""The Plan: its parallel layout, the transport of each process group, and plan.yaml."""
