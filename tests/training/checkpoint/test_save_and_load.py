"""Nothing is lost: interrupted runs go on bit by bit, under another layout too; damage is found; half a save is not
picked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import spawn

from holmes_hpc.training.checkpoint import checkpoint_directory
from holmes_hpc.training.checkpoint import save_and_load as checkpoint

pytestmark = pytest.mark.integration

STEPS = {"steps": 10, "checkpoint_interval": 4, "lr_decay_steps": 10}
BATCH = replace(spawn.BATCH, global_size=4)
PLAN = spawn.plan(pp=2, dp=2, batch=BATCH)


def losses(run: spawn.FinishedRun) -> dict[int, Any]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in run.run.metrics()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    """An uninterrupted run of ten steps on PP 2 x DP 2, checkpoints in the background."""
    ended = spawn.train(tmp_path_factory.mktemp("whole") / "run", PLAN, {"train": {**STEPS, "checkpoint_async": True}})
    assert set(ended.codes) == {0}, ended.output
    return ended


def test_checkpoints_are_kept_and_described(whole: spawn.FinishedRun) -> None:
    found = checkpoint_directory.complete(whole.run.checkpoints)
    assert [s.step for s in found] == [10, 8]
    assert all(checkpoint_directory.damage(s) is None for s in found)
    assert found[0].about["model"]["hidden"] == spawn.MODEL.hidden and found[0].about["device"] == "cpu"
    assert sorted(p.name for p in whole.run.checkpoints.iterdir()) == ["step-00000008", "step-00000010"]


def test_a_resumed_run_has_the_validation_losses_of_its_twin(tmp_path: Path) -> None:
    config = {"train": {"steps": 6, "lr_decay_steps": 6, "eval_interval": 3, "checkpoint_interval": 4}}
    twins = [spawn.train(tmp_path / "whole", PLAN, config)]
    spawn.train(tmp_path / "twice", PLAN, {"train": {**config["train"], "steps": 4}})
    twins.append(spawn.train(tmp_path / "twice", PLAN, config))
    found = [{line["step"]: line.get("validation_loss") for line in ended.run.metrics()} for ended in twins]
    assert found[0] == found[1] and [step for step, loss in found[1].items() if loss] == [3, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves_and_the_rest_is_equal_bit_by_bit(number: int, whole: spawn.FinishedRun, tmp_path: Path) -> None:
    config = {"train": {**STEPS, "checkpoint_interval": 0, "pace_layer_ms": 10}}
    first = spawn.begin(tmp_path / "run", PLAN, config)
    first.wait_for_step(2)
    first.kill(3, number)
    ended = first.finish()
    assert ended.codes == [0, 0, 0, 0], ended.output
    assert {e["state"] for e in ended.run.read_exits()} == {"preempted"}
    told = {e["rank"]: e.get("signal") for e in ended.run.read_exits()}
    assert told == {0: None, 1: None, 2: None, 3: signal.Signals(number).name}
    step = checkpoint_directory.complete(ended.run.checkpoints)[0].step
    assert 2 < step < 10 and max(losses(ended)) == step
    second = spawn.train(tmp_path / "run", PLAN, config)
    assert set(second.codes) == {0}, second.output
    assert losses(second) == losses(whole)
    assert [line["attempt"] for line in second.run.metrics()] == [1] * step + [2] * (10 - step)


def test_a_killed_rank_costs_at_most_the_steps_since_the_last_checkpoint(
    whole: spawn.FinishedRun, tmp_path: Path
) -> None:
    config = {"train": {**STEPS, "checkpoint_async": True, "pace_layer_ms": 20}}
    first = spawn.begin(tmp_path / "run", PLAN, config)
    first.wait_for_step(5)
    end = time.monotonic() + spawn.LIMIT_S
    while not checkpoint_directory.complete(first.run.checkpoints):
        assert time.monotonic() < end
        time.sleep(0.01)
    first.kill(1)
    ended = first.finish()
    assert ended.codes[1] == -9 and set(ended.codes[:1] + ended.codes[2:]) == {1}, ended.output
    second = spawn.train(tmp_path / "run", PLAN, config)
    assert set(second.codes) == {0}, second.output
    assert losses(second) == losses(whole)
    assert min(line["step"] for line in second.run.metrics() if line["attempt"] == 2) == 5


def test_steps_go_on_while_a_save_takes_long_and_a_killed_ranks_writer_ends_with_it(tmp_path: Path) -> None:
    config = {"train": {**STEPS, "checkpoint_async": True, "pace_layer_ms": 20}}
    run = spawn.begin(tmp_path / "run", PLAN, config)
    run.wait_for_step(1)
    pipe = checkpoint_directory.unfinished_path(run.run.checkpoints, 4, 1) / "__2_0.distcp"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)  # who writes rank 2's part waits for a reader
    run.wait_for_step(7)
    assert not checkpoint_directory.complete(run.run.checkpoints)
    writers = psutil.Process(run.pids[2]).children(recursive=True)
    assert writers
    for rank in range(4):
        run.kill(rank)
    assert run.finish().codes == [-9] * 4
    assert not psutil.wait_procs(writers, timeout=spawn.LIMIT_S)[1]


@pytest.mark.parametrize("background", [True, False])
def test_killed_in_the_middle_of_saving(background: bool, whole: spawn.FinishedRun, tmp_path: Path) -> None:
    config = {"train": {**STEPS, "checkpoint_async": background, "pace_layer_ms": 10}}
    first = spawn.begin(tmp_path / "run", PLAN, config)
    first.wait_for_step(4)
    end = time.monotonic() + spawn.LIMIT_S
    while not (half := list(first.run.checkpoints.glob(".saving-step-00000008-*"))):
        assert time.monotonic() < end
    first.kill(2)
    ended = first.finish()
    assert ended.codes[2] == -9 and set(ended.codes[:2] + ended.codes[3:]) == {1}, ended.output
    assert half[0].exists() and [s.step for s in checkpoint_directory.complete(ended.run.checkpoints)] == [4]
    second = spawn.train(tmp_path / "run", PLAN, config)
    assert set(second.codes) == {0}, second.output
    assert losses(second) == losses(whole) and not half[0].exists()


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_too_full_for_a_checkpoint(background: bool, whole: spawn.FinishedRun, tmp_path: Path) -> None:
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        config = {"train": {**STEPS, "checkpoint_async": background, "pace_layer_ms": 20}}
        first = spawn.begin(tmp_path / "run", PLAN, config)
        first.wait_for_step(5)
        end = time.monotonic() + spawn.LIMIT_S
        while not checkpoint_directory.complete(disk):
            assert time.monotonic() < end
            time.sleep(0.01)
        with open(disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        ended = first.finish()
        assert set(ended.codes) == {1} and "No space left on device" in "".join(ended.output), ended.output
        assert "Traceback" not in "".join(ended.output)
        assert [s.step for s in checkpoint_directory.complete(disk)] == [4]
        (disk / "ballast").unlink()
        second = spawn.train(tmp_path / "run", PLAN, config)
        assert set(second.codes) == {0}, second.output
        assert losses(second) == losses(whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


LAYOUTS = {
    "one process": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp3 uneven": {"pp": 3, "layers": [[3], [2], [1]]},
    "interleaved": {"pp": 2, "layers": [[2, 1], [1, 2]]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_continued_under_another_layout(name: str, whole: spawn.FinishedRun, tmp_path: Path) -> None:
    saved = whole.run.checkpoints / "step-00000008"
    ended = spawn.train(
        tmp_path / "run", spawn.plan(**LAYOUTS[name], batch=BATCH), {"train": STEPS, "checkpoint": str(saved)}
    )
    assert set(ended.codes) == {0}, ended.output
    for step in (9, 10):
        assert losses(ended)[step] == pytest.approx(losses(whole)[step], rel=1e-5)


def test_dropout_goes_on_bit_by_bit(tmp_path: Path) -> None:
    plan = spawn.plan(dp=2, batch=BATCH, model=replace(spawn.MODEL, dropout=0.2))
    train = {**STEPS, "steps": 4, "checkpoint_interval": 2}
    whole = spawn.train(tmp_path / "whole", plan, {"train": train})
    ended = spawn.train(
        tmp_path / "rest", plan, {"train": train, "checkpoint": str(whole.run.checkpoints / "step-00000002")}
    )
    assert set(ended.codes) == {0}, ended.output
    assert {k: losses(whole)[k] for k in (3, 4)} == losses(ended)


def copy_of(whole: spawn.FinishedRun, target: Path) -> None:
    import shutil

    shutil.copytree(whole.run.path, target)
    for path in target.glob("metrics*"):
        path.unlink()


def test_a_damaged_checkpoint_is_passed_over(whole: spawn.FinishedRun, tmp_path: Path) -> None:
    copy_of(whole, tmp_path / "run")
    shard = max((tmp_path / "run/checkpoints/step-00000010").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    ended = spawn.train(tmp_path / "run", PLAN, {"train": {**STEPS, "steps": 10}})
    assert set(ended.codes) == {0} and "has other bytes than were written" in ended.output[0], ended.output
    assert sorted(losses(ended)) == [9, 10] and losses(ended)[10] == losses(whole)[10]


def test_when_all_are_damaged_every_rank_says_so_and_ends_with_2(whole: spawn.FinishedRun, tmp_path: Path) -> None:
    copy_of(whole, tmp_path / "run")
    cut, bad = (tmp_path / f"run/checkpoints/step-000000{step}" for step in ("08", "10"))
    (cut / ".metadata").write_bytes((cut / ".metadata").read_bytes()[:-1])
    (bad / ".metadata").write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "ran").encode() + b"\ntR.")  # its writer's code
    about = json.loads((bad / "holmes.json").read_text())
    about["files"][".metadata"] = checkpoint_directory.checksum(bad / ".metadata")
    (bad / "holmes.json").write_text(json.dumps(about))
    ended = spawn.train(tmp_path / "run", PLAN, {"train": STEPS})
    assert set(ended.codes) == {2}, ended.output
    assert "no checkpoint is whole (step-00000010: .metadata: it names os.mkdir" in ended.output[0]
    assert ".metadata is not" in ended.output[0] and "Traceback" not in "".join(ended.output)
    assert not (tmp_path / "ran").exists()


def test_a_chosen_checkpoint_is_where_a_run_begins_and_not_where_it_goes_on(
    whole: spawn.FinishedRun, tmp_path: Path
) -> None:
    plan = spawn.plan(dp=2, batch=BATCH)
    chosen = {"checkpoint": str(whole.run.checkpoints / "step-00000008")}
    first = spawn.train(tmp_path / "run", plan, {"train": STEPS, **chosen})
    assert set(first.codes) == {0} and sorted(losses(first)) == [9, 10], first.output
    again = spawn.train(tmp_path / "run", plan, {"train": {**STEPS, "steps": 12}, **chosen})
    assert set(again.codes) == {0}, again.output
    assert [line["attempt"] for line in again.run.metrics()] == [1, 1, 2, 2]
    none = spawn.train(tmp_path / "none", plan, {"train": STEPS, "checkpoint": "/nowhere/step-00000008"})
    assert set(none.codes) == {2} and "not a complete checkpoint" in none.output[0], none.output
    late = spawn.train(tmp_path / "late", plan, {"train": {**STEPS, "steps": 8}, **chosen})
    assert set(late.codes) == {2} and "stands at step 8, and train.steps is 8" in late.output[0], late.output


def complete(folder: Path, step: int) -> Path:
    path = folder / checkpoint_directory.name_of(step)
    path.mkdir()
    (path / checkpoint_directory.DESCRIPTION).write_text(json.dumps({"files": {".metadata": [0, 0]}}))
    (path / ".metadata").touch()
    return path


def test_all_ranks_take_what_rank_0_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(tmp_path, 4)
    complete(tmp_path, 8).rename(tmp_path / ".old-step-00000008")  # killed between two renames
    (tmp_path / ".saving-step-00000012-1").mkdir()
    sent: list[Any] = []

    def gather(results: list[Any], own: Any, group: object) -> None:
        sent.append(own)
        results[:] = [sent[0], own]

    def of_rank(number: int) -> checkpoint.Checkpoints:
        made = checkpoint.Checkpoints.__new__(checkpoint.Checkpoints)
        made.folder, made._rank, made._group = tmp_path, number, None
        return made

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr(checkpoint.Checkpoints, "_anywhere", lambda _, here: here)
    seen = of_rank(0)._found(None)
    assert [p.name for p in seen] == ["step-00000008", "step-00000004"] and len(list(tmp_path.iterdir())) == 2
    complete(tmp_path, 16)
    (tmp_path / "step-00000004").rename(tmp_path / ".old-step-00000004")
    assert of_rank(1)._found(tmp_path / "step-00000016") == seen
    assert (tmp_path / ".old-step-00000004").exists()


def test_a_checkpoint_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    late = threading.Timer(0.3, complete, (tmp_path, 4))
    late.start()
    save = checkpoint_directory.seen(tmp_path / "step-00000004", 20)
    late.join()
    assert save is not None and save.step == 4
    assert checkpoint_directory.seen(tmp_path / "step-00000008", 0.1) is None


def test_a_checkpoint_of_another_model_is_refused(whole: spawn.FinishedRun, tmp_path: Path) -> None:
    plan = spawn.plan(dp=2, batch=BATCH, model=replace(spawn.MODEL, hidden=64))
    ended = spawn.train(
        tmp_path / "run", plan, {"train": STEPS, "checkpoint": str(whole.run.checkpoints / "step-00000008")}
    )
    assert set(ended.codes) == {2} and "hidden 32, the plan's has 64" in ended.output[0], ended.output


def test_half_a_save_never_counts(tmp_path: Path) -> None:
    half = checkpoint_directory.unfinished_path(tmp_path, 12, 1)
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"x" * 100)
    named = tmp_path / "step-00000013"
    named.mkdir()
    assert checkpoint_directory.complete(tmp_path) == []
    (half / ".metadata").write_bytes(b"where the pieces lie")
    checkpoint_directory.finish(half, 12, {}, {p.name: checkpoint_directory.checksum(p) for p in half.iterdir()})
    assert [s.step for s in checkpoint_directory.complete(tmp_path)] == [12]
    (tmp_path / ".saving-step-00000014-1").mkdir()
    (tmp_path / "step-00000012").rename(tmp_path / ".old-step-00000012")  # killed between two renames
    checkpoint_directory.sweep(tmp_path)
    assert [s.step for s in checkpoint_directory.complete(tmp_path)] == [12]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000012", "step-00000013"]


def test_old_ones_are_removed_but_not_the_latest(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        complete(tmp_path, step)
    assert checkpoint_directory.prune(tmp_path, keep=1) == [4, 2]
    assert [s.step for s in checkpoint_directory.complete(tmp_path)] == [6]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "distributed_optimizer": False},
        {"dp": 4, "optimizer_instances": 2},
        {"tp": 2, "pp": 2, "layers": [[2, 1], [2, 1]]},
    ],
)
def test_other_optimizers_and_layouts_go_on_bit_by_bit(layout: dict[str, Any], tmp_path: Path) -> None:
    plan, train = spawn.plan(**layout, batch=BATCH), {**STEPS, "steps": 4, "checkpoint_interval": 2}
    whole = spawn.train(tmp_path / "whole", plan, {"train": train})
    saved = whole.run.checkpoints / "step-00000002"
    ended = spawn.train(tmp_path / "rest", plan, {"train": train, "checkpoint": str(saved)})
    assert set(ended.codes) == {0}, ended.output
    assert {k: losses(whole)[k] for k in (3, 4)} == losses(ended)
