"""`python -m holmes_hpc`: the `holmes` command where its script is not on the path."""

from holmes_hpc.cli import main

main()
