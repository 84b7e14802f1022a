"""The typed configuration: every key with its type, unit, range and help, in one place."""
