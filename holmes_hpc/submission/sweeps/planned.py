"""The job with a Plan that an application hands to a sweep's launcher; light, because every rank imports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.planning.spec.plan import Plan


@dataclass(frozen=True)
class Planned:
    """A job with a Plan: every rank calls ``function(config)``. `settings`: the site's (group slurm); `record`: more
    keys for run.yaml."""

    plan: Plan
    config: dict[str, Any]
    function: Callable[[dict[str, Any]], Any]
    settings: SlurmSettings
    record: dict[str, Any] = field(default_factory=dict)
