"""The configuration of overrides: by Hydra, or without it where they are plain."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holmes_hpc.config.configuration import Configuration, from_dict
from holmes_hpc.config.options import plain
from holmes_hpc.errors import ConfigError


def load(overrides: Sequence[str] = ()) -> Configuration:
    """Compose and check the configuration with Hydra `overrides` (``model=gpt_3_6b train.steps=5``)."""
    made = plain(overrides)
    if made is None:
        from holmes_hpc.config.by_hydra import composed  # which takes half a second to begin

        made = composed(overrides)
    return from_dict(made)


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse what a given plan has fixed already: another model, batch or layout."""
    for override in overrides:
        if re.match(r"[+~]*(model|batch|plan)[.=@]", override):
            raise ConfigError(
                f"{override!r} is fixed by the plan",
                where="overrides",
                hint="make a plan with it: `holmes plan … -o plan.yaml`",
            )
