from holmes_hpc.cli import main

main()
