"""Forward to batch_end, for batch scripts that were written when it had this name."""

from holmes_hpc.submission.lifecycle.batch_end import main

if __name__ == "__main__":
    raise SystemExit(main())
