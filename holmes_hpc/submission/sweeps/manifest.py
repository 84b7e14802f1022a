"""The manifest of a sweep's jobs: ``sweep.json`` in the sweep directory, written after every submission.

``version, created, jobs[{num, overrides[], directory, kind (plan | plain), where (slurm | local), job_id, folder,
tasks, name, submitted, digest, components, copy, host, program}], programs{digest: {files{}, packages[]}}``.
`directory` and `folder` are relative to the sweep directory if they are inside it.
"""

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
    """A job of a sweep, as recorded in the manifest.

    `directory`: Hydra's output directory, which is the run directory if the job has a plan; `folder`: submitit's
    folder; `submitted`: time in Unix seconds; `digest`: hash of the configuration (:attr:`Candidate.digest`); `copy`:
    number of earlier jobs with the same overrides in the same launch; `host`: machine from which the job was submitted;
    `program`: digest of the job's program, a key of `programs` in the manifest; empty if unknown."""

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
        """The key by which a repeated sweep finds the job."""
        return job_key(self.overrides, self.copy)


def job_key(overrides: Sequence[str], copy: int = 0) -> tuple[str, ...]:
    """Return the key of a job: its sorted overrides, then its `copy` if that is not 0 (see :class:`SweepJob`)."""
    return (*sorted(overrides), *([f"copy {copy}"] if copy else []))


@dataclass
class Manifest:
    """The manifest at `path`. `jobs`: in order of submission; a resubmitted job replaces its earlier entry; `created`:
    time in Unix seconds; `programs`: {digest: the program's files and packages}."""

    path: Path
    jobs: list[SweepJob] = field(default_factory=list)
    created: float = 0.0
    programs: dict[str, Any] = field(default_factory=dict)

    def put(self, job: SweepJob, launched: float = 0.0) -> None:
        """Add `job`, which replaces an earlier entry with the same key, and write the file. Also remove the entries of
        jobs that were submitted into the same directory before the time `launched`."""
        remaining = [j for j in self.jobs if not (j.submitted < launched and j.directory == job.directory)]
        self.jobs = [*(j for j in remaining if j.key != job.key), job]
        programs = {j.program: self.programs[j.program] for j in self.jobs if j.program in self.programs}
        data = {"version": VERSION, "created": self.created, "jobs": list(map(asdict, self.jobs)), "programs": programs}
        write_whole(self.path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def find(self, key: tuple[str, ...], digest: str) -> SweepJob | None:
        """Return the job with this key and this digest of its configuration; None if there is none."""
        return next((j for j in self.jobs if j.key == key and j.digest == digest), None)

    def resolve(self, relative: str) -> Path:
        """Return the absolute path of `relative`, a path in the manifest."""
        return self.path.parent / relative

    def relative(self, path: Path) -> str:
        """Return `path` in the form of the manifest: relative to the sweep directory if it is inside that directory."""
        path, root = path.absolute(), self.path.parent
        return str(path.relative_to(root) if path.is_relative_to(root) else path)


def open_manifest(directory: str | os.PathLike[str], created: float = 0.0) -> Manifest:
    """Return the manifest of a sweep directory; a new one, with the time `created`, if there is none.
    Raise RecordError if the file cannot be read or is of a newer release."""
    path = Path(directory).absolute() / NAME
    try:
        data: Any = from_json(read_file(path))
        if not isinstance(data, dict) or not isinstance(data.get("version"), int) or data["version"] > VERSION:
            hint = "use the holmes_hpc release that wrote it, or a newer one"
            raise RecordError(f"no sweep's manifest, or newer than version {VERSION}", where=str(path), hint=hint)
        jobs = msgspec.convert(data.get("jobs", []), list[SweepJob])
        if unknown := {key for job in data.get("jobs", []) for key in job} - {f.name for f in fields(SweepJob)}:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        return Manifest(path, jobs, float(data.get("created", 0.0)), dict(data.get("programs") or {}))
    except FileNotFoundError:
        return Manifest(path, [], created)
    except (OSError, TypeError, ValueError, msgspec.ValidationError) as e:
        raise RecordError(f"not a sweep's manifest: {e}", where=str(path), hint="restore the file") from e


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a sweep that was launched. Raise RecordError if there is none, or if it cannot be read."""
    if not (Path(directory) / NAME).is_file():
        hint = "give the directory of a sweep launched with hydra/launcher=holmes_slurm or holmes_local"
        raise RecordError(f"no {NAME}", where=str(directory), hint=hint)
    return open_manifest(directory)
