"""The networks of a run: rendezvous, interfaces, link checks, process groups, and byte counters of NICs."""
