"""A job of a launch before it is submitted, and its entry in the manifest afterwards."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf

from holmes_hpc.submission.plan_job import Planned
from holmes_hpc.submission.sweeps.launcher_settings import ENVIRONMENT
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob, key_of
from holmes_hpc.submission.sweeps.program import Program
from holmes_hpc.submission.sweeps.returns import task_config


@dataclass(frozen=True)
class Candidate:
    """A job of this launch. `copy`: how many jobs with the same overrides came before it; `program`: None without a
    source file."""

    num: int
    overrides: list[str]
    config: DictConfig
    planned: Planned | None
    copy: int
    program: Program | None

    @property
    def key(self) -> tuple[str, ...]:
        """What finds it again in the manifest."""
        return key_of(self.overrides, self.copy)

    @property
    def digest(self) -> str:
        """What makes it the same job in a repeated sweep, beside its overrides: the configuration, and the Plan or what
        the launcher's settings say of the environment. (The program is compared by itself: see program.py.)"""
        data = OmegaConf.to_yaml(task_config(self.config))
        launcher = self.config.hydra.launcher
        data += self.planned.plan.id if self.planned else repr([(key, launcher.get(key)) for key in ENVIRONMENT])
        return hashlib.sha256(data.encode()).hexdigest()[:16]

    @property
    def directory(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute() / str(self.config.hydra.sweep.subdir)

    def entry(self, manifest: Manifest, folder: Path, **submitted: Any) -> SweepJob:
        """Return its entry in `manifest`; `submitted`: the fields of SweepJob that the submission decided."""
        return SweepJob(
            num=self.num,
            overrides=tuple(self.overrides),
            directory=manifest.relative(self.directory),
            kind="plain" if self.planned is None else "plan",
            folder=manifest.relative(folder),
            digest=self.digest,
            copy=self.copy,
            host=os.uname().nodename,
            program=self.program.digest if self.program else "",
            **submitted,
        )

    def __str__(self) -> str:
        return f"\t#{self.num} : {' '.join(filter_overrides(self.overrides))}"
