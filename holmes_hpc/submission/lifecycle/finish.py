"""The former name of batch_end, which older batch scripts still call."""

from holmes_hpc.submission.lifecycle.batch_end import main

if __name__ == "__main__":
    raise SystemExit(main())
