"""Loading many run directories into DataFrames, with a cache."""
