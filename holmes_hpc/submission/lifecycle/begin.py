"""The former name of batch_start, which older batch scripts still call."""

from holmes_hpc.submission.lifecycle.batch_start import main

if __name__ == "__main__":
    raise SystemExit(main())
