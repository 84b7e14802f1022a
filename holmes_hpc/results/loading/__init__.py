"""Reading of many run directories into DataFrames, with a cache."""
