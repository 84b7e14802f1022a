"""A run continues from copies of its state in the memory of two nodes. Slots are files here; agents use memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import spawn

from holmes_hpc.config.elastic import ElasticConfig
from holmes_hpc.config.model import Experts
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import Place
from holmes_hpc.training.checkpoint.copy_slots import (
    Entry,
    Index,
    Row,
    Slot,
    interval,
    moves,
    newest,
    rings,
    state_start,
)

BATCH = replace(spawn.BATCH, global_size=4)
TRAIN = {"steps": 12, "checkpoint_interval": 0, "lr_decay_steps": 12, "pace_layer_ms": 10.0}
PIPELINE = spawn.plan(pp=2, dp=2, batch=BATCH)
TIED = replace(spawn.MODEL, tied=True)
EXPERTS = replace(spawn.MODEL, layers=4, experts=Experts(4, top_k=2, ffn=32, balance=0.01))


def slots_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-slots")


def environment(folder: Path, ranks: int, others: Sequence[int] = ()) -> dict[int, dict[str, str]]:
    """Return each rank's variable with its slots, which rank 0 shares with `others`, ranks of an earlier start."""
    folder.mkdir(parents=True, exist_ok=True)
    slots = {rank: [folder / f"{rank}-{letter}" for letter in "abcd"] for rank in (*range(ranks), *others)}
    for path in chain(*slots.values()):
        path.touch()
    slots[0] += chain(*(slots[rank] for rank in others))
    return {rank: {"HOLMES_COPY_SLOTS": ":".join(map(str, slots[rank]))} for rank in range(ranks)}


def interrupted(directory: Path, plan: Plan, lost: Sequence[int], **train: Any) -> None:
    """Run until step 7, kill all ranks, and empty the slots of the `lost` ones."""
    config = {"train": {**TRAIN, **train}, "elastic": ElasticConfig(copy_every=2)}
    run = spawn.begin(directory, plan, config, environment=environment(slots_of(directory), plan.world_size))
    run.wait_for_step(7)
    for rank in (*lost, *(rank for rank in range(plan.world_size) if rank not in lost)):
        run.kill(rank)
    run.finish()
    for rank in lost:
        for letter in "abcd":
            (slots_of(directory) / f"{rank}-{letter}").write_bytes(b"")


def resumed(directory: Path, plan: Plan, others: Sequence[int] = (), **train: Any) -> spawn.FinishedRun:
    config = {"train": {**TRAIN, **train}, "elastic": ElasticConfig(copy_every=2)}
    slots = environment(slots_of(directory), plan.world_size, others)
    ended = spawn.train(directory, plan, config, environment=slots)
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("step") == list(range(1, 13))
    return ended


def first_step(ended: spawn.FinishedRun) -> int:
    """Return the first step of the second attempt."""
    return min(line["step"] for line in ended.run.metrics() if line["attempt"] == 2)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    """Return an undisturbed run of PIPELINE."""
    return spawn.train(tmp_path_factory.mktemp("pipeline"), PIPELINE, {"train": TRAIN})


SAME_PLAN = {
    "sharded optimizer": (PIPELINE, {}),
    "unsharded": (spawn.plan(pp=2, dp=2, batch=BATCH, distributed_optimizer=False), {}),
    "bf16": (PIPELINE, {"dtype": "bf16"}),
    "virtual stages": (spawn.plan(pp=2, dp=2, layers=[[1, 2], [2, 1]], batch=BATCH), {}),
    "EP 2": (spawn.plan(pp=2, dp=2, ep=2, batch=BATCH, model=EXPERTS), {}),
    "ETP 2": (spawn.plan(pp=2, dp=2, etp=2, ep_comm="allgather", batch=BATCH, model=EXPERTS), {}),
    "TP 2": (spawn.plan(tp=2, pp=2, dp=2, batch=BATCH, sequence_parallel=True), {}),
    "dropout": (spawn.plan(pp=2, dp=2, batch=BATCH, model=replace(spawn.MODEL, dropout=0.1)), {}),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [n if n == "sharded optimizer" else pytest.param(n, marks=pytest.mark.thorough) for n in SAME_PLAN]
)
def test_the_same_plan_continues_bit_by_bit_from_a_copy_without_a_lost_rank(
    name: str, pipeline: spawn.FinishedRun, tmp_path: Path
) -> None:
    plan, train = SAME_PLAN[name]
    is_other = plan is not PIPELINE or train
    whole = spawn.train(tmp_path / "whole", plan, {"train": {**TRAIN, **train}}) if is_other else pipeline
    last = plan.world_size - 1
    interrupted(tmp_path / "run", plan, [last], **train)
    ended = resumed(tmp_path / "run", plan, **train)
    assert first_step(ended) >= 5 and "from a copy in memory" in ended.log(0)
    assert "every 2 steps" in ended.log(0)
    for column in ("loss", "grad_norm"):
        assert ended.column(column) == whole.column(column)


OTHER_PLANS = {
    "per-stage DP": (PIPELINE, spawn.unequal((1, 2), (1, 1), batch=BATCH)),
    "no pipeline": (PIPELINE, spawn.plan(dp=2, batch=BATCH)),
    "tied": (spawn.plan(pp=2, dp=2, batch=BATCH, model=TIED), spawn.plan(dp=2, batch=BATCH, model=TIED)),
    "EP 2": (SAME_PLAN["EP 2"][0], spawn.plan(dp=2, batch=BATCH, model=EXPERTS)),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [n if n == "per-stage DP" else pytest.param(n, marks=pytest.mark.thorough) for n in OTHER_PLANS]
)
def test_another_plan_for_the_ranks_left_continues_from_the_copy(
    name: str, pipeline: spawn.FinishedRun, tmp_path: Path
) -> None:
    plan, smaller = OTHER_PLANS[name]
    whole = pipeline if plan is PIPELINE else spawn.train(tmp_path / "whole", plan, {"train": TRAIN})
    interrupted(tmp_path / "run", plan, [3])
    ended = resumed(tmp_path / "run", smaller, others=range(smaller.world_size, 4))
    assert first_step(ended) >= 5
    assert ended.column("loss") == pytest.approx(whole.column("loss"), rel=1e-6)


@pytest.mark.integration
def test_without_a_complete_copy_the_last_checkpoint_is_loaded(tmp_path: Path) -> None:
    """The lost ranks are neighbours in their ring, so that nobody has their ranges. Checkpoints are older."""
    interrupted(tmp_path / "run", PIPELINE, [2, 3], checkpoint_interval=3)
    ended = resumed(tmp_path / "run", PIPELINE, checkpoint_interval=3)
    assert first_step(ended) in (4, 7) and "copy in memory" not in ended.log(0).partition("every")[0]


@pytest.mark.integration
@pytest.mark.thorough
def test_a_plan_with_another_tp_loads_the_last_checkpoint(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", PIPELINE, [3], checkpoint_interval=3)
    plan = spawn.plan(tp=2, batch=BATCH, sequence_parallel=True)
    assert first_step(resumed(tmp_path / "run", plan, others=(2, 3), checkpoint_interval=3)) in (4, 7)


def test_a_ring_has_the_same_rank_of_each_node_of_a_fabric() -> None:
    fabric_of = {"a": "ib", "b": "ib", "c": "roce"}
    places = [
        Place(pool, f"{pool}[{n}]")
        for pool, nodes in (("a", 2), ("b", 1), ("c", 2))
        for n in range(nodes)
        for _ in "xy"
    ]
    assert rings(places, fabric_of) == [(0, 2, 4), (1, 3, 5), (6, 8), (7, 9)]
    one_each = [Place(pool, f"{pool}[0]") for pool in ("a", "c") for _ in "xy"]
    assert rings(one_each, fabric_of) == [(0, 2), (1, 3)]
    assert rings(one_each[:2], fabric_of) == [(0,), (1,)]


@pytest.mark.parametrize("seed", range(20))
def test_every_needed_element_is_moved_once_from_the_nearest_holder(seed: int) -> None:
    rng, key, length = random.Random(seed), (6, 1, 6.0), 100
    cuts = sorted({0, length, *rng.sample(range(1, length), 5)})
    entries = [Entry("w", a, b, 3, 4) for a, b in pairwise(cuts)]
    held = [{key: rng.sample(entries, rng.randint(0, len(entries)))} for _ in range(4)]
    held[0][key] = entries if rng.random() < 0.5 else held[0][key]
    needs = [(first := rng.randrange(length), rng.randint(first + 1, length)) for _ in range(4)]
    rows = [Row(h, [("w", *n)], "g") for h, n in zip(held, needs, strict=True)]
    found = moves(key, rows)
    available = {e for h in held for entry in h[key] for e in range(entry.first, entry.last)}
    assert (found is None) == any(set(range(*n)) - available != set() for n in needs)
    assert newest(rows, after=6) is None and newest(rows, after=5) == (None if found is None else (key, found))
    for target, need in enumerate(needs) if found is not None else ():
        parts = [(source, part) for (source, t), some in found.items() if t == target for part in some]
        assert sorted(e for _, part in parts for e in range(part.first, part.last)) == list(range(*need))
        own = {e for entry in held[target][key] for e in range(entry.first, entry.last)}
        assert all(source == target for source, part in parts if part.first in own)


def test_a_copy_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    (path := tmp_path / "slot").touch()
    slot, index = Slot(str(path)), Index.of((4, 1, 4.0), [("w", 0, 3, 3, 4), ("v", 0, 1, 1, 8)])
    assert slot.index() is None and index.state_bytes == 3 * 3 * 4 + 8
    slot.reserve(4096)
    slot.write_index(b'[[4,1,4.0],[["w",0,3,3,4,0]]]')
    assert Slot(str(path)).index() is None
    slot.complete(29, 4096)
    assert (found := Slot(str(path)).index()) is not None and found.entries == [Entry("w", 0, 3, 3, 4)]
    assert slot.state_start() == state_start(29) == 64
    slot.begin()
    assert Slot(str(path)).index() is None


def test_the_interval_keeps_copies_within_a_share_of_the_time() -> None:
    assert interval(7e9, 200, 4.0) == 7  # 0.28 s of at least 28 s
    assert interval(1e6, 200, 4.0) == 2
