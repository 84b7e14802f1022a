"""The manifest of a sweep's jobs: ``sweep.json`` in the sweep directory, written after every submission.

``version, created, jobs[{num, overrides[], directory, kind (plan | plain), where (slurm | local), job_id, folder,
tasks, name, submitted, digest, components, copy, host, program}], programs{digest: {files{}, packages[]}}``.
`directory` and `folder` are relative to the sweep directory if they are inside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from holmes_hpc.errors import RecordError
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.untrusted import from_json, read_file

VERSION = 2
NAME = "sweep.json"


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.
    `directory`: Hydra's output directory, for a plan's job its run directory; `host`: the machine of a local job;
    `program`: the digest of its program (a key of the manifest's programs), empty if unknown."""

    num: int
    overrides: tuple[str, ...]
    directory: str
    kind: str
    where: str
    job_id: str
    folder: str
    tasks: int = 1
    name: str = ""
    submitted: float = 0.0
    digest: str = ""
    components: int = 1
    copy: int = 0
    host: str = ""
    program: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The key that identifies the job in a repeated sweep."""
        return job_key(self.overrides, self.copy)


def job_key(overrides: Sequence[str], copy: int = 0) -> tuple[str, ...]:
    """Return the key of a job with these overrides. `copy`: the number of earlier jobs of its launch with the same."""
    return (*sorted(overrides), *([f"copy {copy}"] if copy else []))


@dataclass
class Manifest:
    """The jobs of one sweep directory, in order of submission; a resubmitted job replaces its older entry."""

    path: Path
    jobs: list[SweepJob] = field(default_factory=list)
    created: float = 0.0
    programs: dict[str, Any] = field(default_factory=dict)

    def put(self, job: SweepJob, launched: float = 0.0) -> None:
        """Add or replace a job and write the file. Jobs submitted before `launched` into its directory are removed."""
        self.jobs = [
            *(
                j
                for j in self.jobs
                if j.key != job.key and not (j.submitted < launched and j.directory == job.directory)
            ),
            job,
        ]
        data = {
            "version": VERSION,
            "created": self.created,
            "jobs": [asdict(j) for j in self.jobs],
            "programs": {j.program: self.programs[j.program] for j in self.jobs if j.program in self.programs},
        }
        write_whole(self.path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def find(self, key: tuple[str, ...], digest: str) -> SweepJob | None:
        """Return the job of an earlier launch with the same overrides and configuration."""
        return next((j for j in self.jobs if j.key == key and j.digest == digest), None)

    def resolve(self, relative: str) -> Path:
        """Return the absolute path of a path in the manifest."""
        return self.path.parent / relative

    def relative(self, path: Path) -> str:
        """Return `path` as written in the manifest: relative if it is inside the sweep directory."""
        path, root = path.absolute(), self.path.parent
        return str(path.relative_to(root) if path.is_relative_to(root) else path)


def open_manifest(directory: str | os.PathLike[str], created: float = 0.0) -> Manifest:
    """Return the manifest of a sweep directory; an empty one if there is no file."""
    path = Path(directory).absolute() / NAME
    try:
        data: Any = from_json(read_file(path))
        if not isinstance(data, dict) or not isinstance(data.get("version"), int) or data["version"] > VERSION:
            raise RecordError("no manifest, or of a newer release", where=str(path), hint="use a newer holmes_hpc")
        jobs = msgspec.convert(data.get("jobs", []), list[SweepJob])
        if unknown := {key for job in data.get("jobs", []) for key in job} - {f.name for f in fields(SweepJob)}:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        return Manifest(path, jobs, float(data.get("created", 0.0)), dict(data.get("programs") or {}))
    except FileNotFoundError:
        return Manifest(path, [], created)
    except (OSError, TypeError, ValueError, msgspec.ValidationError) as e:
        raise RecordError(f"not a manifest: {e}", where=str(path), hint="restore the file") from e


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a launched sweep. RecordError if there is none."""
    if not (Path(directory) / NAME).is_file():
        raise RecordError(
            f"no {NAME}",
            where=str(directory),
            hint="give the directory of a sweep launched with hydra/launcher=holmes_slurm or holmes_local",
        )
    return open_manifest(directory)
