"""Reports of one made-up run and of a made-up sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run

from holmes_hpc.results.report import Report, load_report


@pytest.fixture
def one(tmp_path: Path) -> Report:
    return load_report([make_run(tmp_path / "a", steps=20).path])


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six repeats, interleaved, of four settings; the machine is 1.5 times slower in the second session."""
    settings: list[tuple[dict[str, int], str, float]] = [
        ({"ib-a": 4}, "holmes", 1.0),
        ({"ib-a": 2, "roce-a": 2}, "holmes", 1.05),
        ({"ib-a": 2, "roce-a": 2}, "single", 2.1),
        ({"eth-a": 4}, "holmes", 2.0),
    ]
    number, tmp_path = 0, tmp_path_factory.mktemp("sweep")
    for repeat in range(6):
        session, slower = ("one", 1.0) if repeat < 3 else ("two", 1.5)
        for placement, transport, seconds in settings:
            make_run(
                tmp_path / str(number),
                placement,
                transport=transport,
                step_time_s=seconds * slower,
                seed=number,
                started=f"2025-01-01T12:{number:02d}:00+00:00",
                labels={"session": session},
            )
            number += 1
    make_run(tmp_path / "cut-off", {"ib-a": 4}, step_time_s=50.0, steps=3, state=None)
    return tmp_path
