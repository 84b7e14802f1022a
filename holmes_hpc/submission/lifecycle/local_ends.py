"""How the ranks of a local job ended, as their parent process saw it: what srun says of a step's tasks in Slurm."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.files import to_json, write_whole
from holmes_hpc.records.untrusted import from_json, read_file
from holmes_hpc.submission.lifecycle.failed_rank import Complaint, by_signal


@dataclass(frozen=True)
class LocalEnds:
    """`told`: the job was told to end, by SIGTERM; `codes`: (rank, exit code, below 0 of a signal), first end first."""

    told: bool = False
    codes: tuple[tuple[int, int], ...] = ()

    def complaints(self, node: str) -> list[Complaint]:
        """As of srun, about the ranks that did not end well."""
        return [
            Complaint(node, (rank,), f"exited with exit code {code}" if code > 0 else by_signal(-code))
            for rank, code in self.codes
            if code
        ]


def note_ends(folder: Path, job_id: str, told: bool, codes: Sequence[tuple[int, int]]) -> None:
    """In the ranks' parent, when all have ended."""
    with contextlib.suppress(HolmesError):
        write_whole(_path(folder, job_id), to_json({"told": told, "codes": codes}) + "\n")


def noted_ends(folder: Path, job_id: str) -> LocalEnds:
    """What the parent of the ranks noted; nothing where it could not, or there was none (ranks with GPUs)."""
    try:
        data = from_json(read_file(_path(folder, job_id)))
        return LocalEnds(bool(data["told"]), tuple((int(rank), int(code)) for rank, code in data["codes"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return LocalEnds()


def _path(folder: Path, job_id: str) -> Path:
    return folder / f"{job_id}_ends.json"
