"""What `holmes calibrate` measures: layers of the model, and networks."""
