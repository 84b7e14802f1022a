"""Claims of starts: of two coordinators only one starts the ranks. The other one stands aside.

A coordinator claims a start of the ranks by creating a file in the folder of submissions. The file lists the nodes that
were lost before. An agent that has lost its coordinator claims the next start, and with it the coordinator's place.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from holmes_hpc.submission.lifecycle.attempts import attempt_id

EXPIRY_S = 30.0  # the age of a claim whose coordinator has not appeared, from which on the next start may be claimed


def attempt_path(folder: Path, name: str) -> Path:
    """Return the path of a file of this attempt in the folder of submissions."""
    return folder / f"{attempt_id(os.environ).replace('/', '-')}_{name}"


def claim(folder: Path, start: int, lost: Iterable[str]) -> bool:
    """Claim a start of the ranks. Return False if another coordinator has claimed it. `lost`: nodes lost before."""
    try:
        with attempt_path(folder, f"start-{start}").open("x") as file:
            file.write(" ".join(sorted(lost)))
    except FileExistsError:
        return False
    return True


def newest_claim(folder: Path, start: int = 0) -> int:
    """Return the number of the last claimed start, or `start` if no later start is claimed."""
    while attempt_path(folder, f"start-{start + 1}").exists():
        start += 1
    return start


def claim_age_s(folder: Path, start: int) -> float:
    """Return the seconds since `start` was claimed, by the clocks of this node and of the file server."""
    with contextlib.suppress(OSError):
        return max(0.0, time.time() - attempt_path(folder, f"start-{start}").stat().st_mtime)
    return 0.0


def lost_before(folder: Path, start: int) -> set[str]:
    """Return the nodes lost before `start`, as listed in the claims of the starts up to it."""
    paths = [attempt_path(folder, f"start-{number}") for number in range(1, start + 1)]
    return {node for path in paths if path.exists() for node in path.read_text().split()}
