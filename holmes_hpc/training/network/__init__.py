"""How ranks reach each other: rendezvous, interfaces, link checks, process groups, and bytes counted by NIC."""
