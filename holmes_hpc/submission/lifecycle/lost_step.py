"""The end of a step that Slurm lost: ``python -m holmes_hpc.submission.lifecycle.lost_step RUN_DIR RANKS SRUN``.

If a slurmstepd is killed, its tasks run to their end, but srun waits for the slurmstepd until the time limit. The batch
script starts this module beside srun, whose process id is SRUN. It kills srun GRACE_S after all ranks have ended.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory

INTERVAL_S = 10.0  # between two readings of the exit records
GRACE_S = 20.0  # from the last exit record to the end of srun


def main() -> None:
    run, ranks, srun = RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    earlier = exit_records(run)
    while sum(record not in earlier for record in exit_records(run)) < ranks:
        time.sleep(INTERVAL_S)
    time.sleep(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(srun, signal.SIGKILL)
        log_batch_line(f"every rank ended {GRACE_S:g} s ago, but srun still waited: Slurm lost the step; killed srun")


def exit_records(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the exit records of the latest attempt (at its start: an earlier one's); empty if unreadable."""
    with contextlib.suppress(HolmesError, OSError):
        return run.read_exits()
    return []


if __name__ == "__main__":
    main()
