"""Renamed configuration keys."""

from __future__ import annotations

import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.config.renamed_keys import _note_once
from holmes_hpc.errors import ConfigError


def test_a_former_name_works_and_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    _note_once.cache_clear()
    former = ["slurm.fabrics={ib-a: {mem: 1G}}", "plan.fabric_order=[roce-a, ib-a]"]
    new = ["slurm.pools={ib-a: {mem: 1G}}", "plan.pool_order=[roce-a, ib-a]"]
    configs = [load([*keys, "name=x"]) for keys in (former, former, new)]
    assert configs[0] == configs[1] == configs[2]
    notes = capsys.readouterr().err.splitlines()
    assert sorted(notes) == [
        "plan.fabric_order is deprecated; use plan.pool_order",
        "slurm.fabrics is deprecated; use slurm.pools",
    ]


def test_both_names_of_a_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"slurm.fabrics: slurm.pools, its new name, is also set"):
        load(["slurm.fabrics={ib-a: {mem: 1G}}", "slurm.pools={ib-a: {mem: 2G}}"])
