"""The measurements of `holmes calibrate`: layers of the model, and networks."""
