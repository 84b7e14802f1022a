"""What a plan says: the Plan, its parallel grid, the transport of each group."""
