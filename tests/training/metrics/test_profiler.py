"""Traces of torch's profiler: their steps, ranks and ranges, and windows that no run has."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import spawn
import thorough

from holmes_hpc.config.train import Profile, TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.training.metrics.profiler import Profiler, Ranges
from holmes_hpc.training.rank import signals


@pytest.mark.integration  # ranks as processes
@pytest.mark.parametrize("schedule", thorough.all_but(["1f1b", "ahead"], "ahead"))
def test_a_profile_has_passes_and_transfers_of_its_steps_on_its_ranks(tmp_path: Path, schedule: str) -> None:
    plan = spawn.plan(pp=2, schedule=schedule, in_flight=(2, 1))
    train = {"steps": 6, "checkpoint_interval": 2, "profile": Profile(2, 3, (1,))}  # with a save after the profile
    ended = spawn.train(tmp_path, plan, {"train": train})
    assert ended.codes == [0, 0], ended.output
    (path,) = ended.run.trace.glob("profile-*")
    assert path.name == "profile-rank-1.json.gz" and f"profile written to {path}" in ended.log(1)
    names = Counter(event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    for name in ("forward-compute", "backward-compute", "receive forward 0->1", "send backward 1->0"):
        assert names[name] == 2 * plan.micro_batches, name
    assert names["optimizer_s"] == 2
    assert ended.run.metrics()[3]["pause_before_s"] > 0  # writing it is no part of a step


@pytest.mark.parametrize(("start", "stop"), [(18, 21), (3, 2)])
def test_a_window_outside_the_run_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainConfig(steps=20, profile=Profile(start, stop))
    assert str(refused.value) == f"train.profile.stop is {stop}; use a step from start up to steps, which is 20"


def test_ranks_that_the_run_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.profile\.ranks: rank 4 does not exist; use 0 to 3"):
        Profiler(Profile(1, 2, (0, 4)), tmp_path, 0, 4)


def test_no_rank_outside_the_list_writes_a_profile(tmp_path: Path) -> None:
    profiler = Profiler(Profile(1, 1, (1,)), tmp_path, 0, 2)
    profiler.start_step(1)
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_operations_in_progress_end_before_the_profile(tmp_path: Path) -> None:
    is_profiling: list[bool] = []
    profiler = Profiler(Profile(1, 1, (0,)), tmp_path, 0, 1, None, [lambda: is_profiling.append(Ranges.active)])
    profiler.start_step(1)
    profiler.start_step(2)
    assert is_profiling == [True] and not Ranges.active


def test_waiting_for_the_flags_of_a_step_keeps_them(monkeypatch) -> None:
    work = MagicMock()
    monkeypatch.setattr(signals.dist, "all_reduce", lambda *_, **__: work)
    flags = signals.ControlAllReduce(None)
    flags.start(stop=True, writing=False, copying=False)
    flags.wait()
    work.wait.assert_called_once()
    assert flags.finish() == signals.AnyRank(stop=True, writing=False, copying=False)
