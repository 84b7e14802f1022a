"""Run directories as DataFrames: reading many runs fast, once."""
