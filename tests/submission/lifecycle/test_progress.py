"""Progress of a job, the status of runs, and a plan as local processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import plans
import psutil
import pytest
from sites import A100

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError, RecordError, RunFailed, SubmissionError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.schema import make
from holmes_hpc.slurm.commands import Answer
from holmes_hpc.slurm.job_queries import SEPARATOR
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.lifecycle.attempts import START_MARK
from holmes_hpc.submission.lifecycle.progress import report_progress
from holmes_hpc.submission.lifecycle.status import (
    SlurmJob,
    cancel_run,
    job_of,
    log_paths,
    record_end,
    run_status,
    run_statuses,
)
from holmes_hpc.submission.local import run_plan_locally
from holmes_hpc.submission.plan_job import PlannedJob, plan_components, plan_executor
from holmes_hpc.submission.templates import plan_script

pytestmark = pytest.mark.integration


class ScriptedJob:
    """A job with the states given by a test. A function returns a state after it did something."""

    id = "7"

    def __init__(self, *states: JobState | Callable[[], JobState]) -> None:
        self.states, self.cancelled = list(states), False

    def state(self, mode: str = "standard") -> JobState:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return state() if callable(state) else state

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "run", config={"train": {"steps": 5, "max_restarts": 0}})
    made.start_attempt({})
    return made


def test_states_reasons_and_the_log_are_shown(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    def runs() -> JobState:
        run.log_path(0).write_text("step 1\nstep 2\n")
        return JobState("RUNNING", nodes="ib[1-2]", source="squeue")

    def ends() -> JobState:
        run.write_result({"state": "completed"})
        return JobState("COMPLETED", source="sacct")

    job = ScriptedJob(JobState("PENDING", "Resources", source="squeue"), runs, ends)
    assert report_progress(run, job, poll_s=0.01, slurm_every_s=0.05) == 0
    out, err = capfd.readouterr()
    assert out == "step 1\nstep 2\n"
    assert "PENDING: Resources" in err and "RUNNING on ib[1-2]" in err and "run: completed" in err


def test_the_phase_of_a_starting_job_is_shown(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holmes_hpc.submission.lifecycle.progress.EARLY_SILENCE_S", 0.0)

    def load() -> JobState:
        time.sleep(0.1)
        run.log_path(0).touch()
        return JobState("RUNNING")

    def set_up() -> JobState:
        time.sleep(0.1)
        run.log_path(0).write_text("4 ranks met\n")
        return JobState("RUNNING")

    def ends() -> JobState:
        run.write_result({"state": "completed"})
        return JobState("COMPLETED")

    assert (
        report_progress(
            run,
            ScriptedJob(JobState("RUNNING"), JobState("RUNNING"), load, set_up, JobState("RUNNING"), ends),
            poll_s=0.01,
            slurm_every_s=0.02,
        )
        == 0
    )
    before, _, after = capfd.readouterr().err.rpartition("ranks load torch and Megatron-Core: ")
    assert "the nodes start the ranks: " in before and "job 7: RUNNING, " in after


def test_the_phase_is_repeated_while_ranks_load(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holmes_hpc.submission.lifecycle.progress.EARLY_SILENCE_S", 0.0)
    monkeypatch.setattr("holmes_hpc.submission.lifecycle.progress.EARLY_S", 0.0)

    def later() -> JobState:
        time.sleep(0.1)
        return JobState("RUNNING")

    def ends() -> JobState:
        run.write_result({"state": "completed"})
        return JobState("COMPLETED")

    assert (
        report_progress(run, ScriptedJob(JobState("RUNNING"), later, later, ends), poll_s=0.01, slurm_every_s=0.02) == 0
    )
    assert "the nodes start the ranks: " in capfd.readouterr().err


def test_the_follower_writes_a_missing_result(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holmes_hpc.submission.lifecycle.progress.SETTLE_S", 0.1)
    assert (
        report_progress(
            run, ScriptedJob(JobState("NODE_FAIL", nodes="ib1", components=("NODE_FAIL",), source="sacct")), poll_s=0.01
        )
        == 1
    )
    result = run.read_result()
    assert result is not None and result["writer"] == "follower" and "NODE_FAIL" in result["error"]


def test_the_last_step_of_a_cancelled_run_is_recorded_if_its_batch_script_was_killed(run: RunDirectory) -> None:
    run.append_metrics({"step": 1, "loss": 5.0, "attempt": 1})
    run.write_result({"state": "cancelled", "final": {"step": 1}}, writer="follower")  # by batch_end --so-far
    run.append_metrics({"step": 2, "loss": 4.0, "attempt": 1})  # the step after the signal
    assert report_progress(run, ScriptedJob(JobState("CANCELLED", source="sacct")), poll_s=0.01) == 1
    result = run.read_result()
    assert result is not None and (result["state"], result["final"]["step"]) == ("cancelled", 2)


def test_the_end_is_returned_even_if_the_disk_is_full(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> bool:
        raise RunFailed("No space left on device", where="result.json", hint="free some space")

    monkeypatch.setattr(RunDirectory, "write_result", full)
    result = record_end(run, JobState("NODE_FAIL", nodes="ib1", components=("NODE_FAIL",), source="sacct"))
    assert result["state"] == "failed" and "NODE_FAIL" in result["error"]


def test_progress_continues_after_a_preemption(run: RunDirectory) -> None:
    run.write_result({"state": "preempted"}, writer="follower")

    def restart() -> JobState:
        run.start_attempt({})
        return JobState("RUNNING", source="squeue")

    def ends() -> JobState:
        run.write_result({"state": "completed"})
        return JobState("COMPLETED", source="sacct")

    job = ScriptedJob(JobState("PREEMPTED", unsettled=True), JobState("PENDING", "BeginTime"), restart, ends)
    assert report_progress(run, job, poll_s=0.01, slurm_every_s=0.02) == 0


@pytest.mark.parametrize("answer, code", [("detach", 130), ("cancel", 1)])
def test_ctrl_c_asks(run: RunDirectory, answer: str, code: int) -> None:
    def interrupt() -> JobState:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # the signal arrives
        raise AssertionError("not interrupted")

    def after() -> JobState:
        run.write_result({"state": "cancelled"})
        return JobState("CANCELLED", source="squeue")

    job = ScriptedJob(JobState("RUNNING"), interrupt, after)
    assert report_progress(run, job, poll_s=0.01, slurm_every_s=0.02, ask_user=lambda: answer) == code
    assert job.cancelled is (answer == "cancel")


def test_the_states_of_many_runs_need_one_query(tmp_path: Path, fake_slurm: Any) -> None:
    lines = []
    runs = []
    for i in range(1, 31):
        made = RunDirectory.create(
            tmp_path / f"r{i}", config={"train": {"steps": 9}}, slurm={"job_id": i, "submitted": time.time() - 100}
        )
        made.start_attempt({})
        runs.append(made)
        lines.append(SEPARATOR.join([str(i), "RUNNING", str(int(time.time())), "None", "ib1", "x"]))
    fake_slurm.answer("squeue", "cat <<'E'\n" + "\n".join(lines) + "\nE")
    runs[3].write_result({"state": "failed", "error": "why", "failed_rank": 2, "failed_node": "n"})
    found = run_statuses(runs)
    assert [s.state for s in found] == ["running"] * 3 + ["failed"] + ["running"] * 26
    assert found[3].failed_rank == 2 and found[3].error == "why"
    assert len(fake_slurm.calls("squeue")) == 1


def test_a_run_that_was_never_submitted(run: RunDirectory) -> None:
    assert run_status(run).state == "not_submitted"
    with pytest.raises(SubmissionError, match="never submitted"):
        cancel_run(run)


def test_a_run_whose_end_is_recorded_is_not_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    made = RunDirectory.create(tmp_path / "r", slurm={"job_id": 7, "submitted": time.time()})
    made.write_result({"state": "completed"}, writer="batch")
    assert cancel_run(made).state == "COMPLETED"
    assert fake_slurm.calls("scancel") == []  # another job may have the id by now


def test_a_job_that_the_controller_does_not_know_is_not_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    made = RunDirectory.create(tmp_path / "r", slurm={"job_id": 7, "submitted": time.time()})
    fake_slurm.answer("squeue", "exit 0")
    assert cancel_run(made).state == "UNKNOWN" and fake_slurm.calls("scancel") == []


def test_a_lost_job_is_recorded_as_failed(tmp_path: Path, fake_slurm: Any) -> None:
    made = RunDirectory.create(tmp_path / "r", slurm={"job_id": 7, "submitted": time.time() - 600})
    (made.path / "submission").mkdir()
    ticket = {"name": "x", "submitted": time.time() - 600}
    (made.path / "submission" / "7_job.json").write_text(json.dumps(ticket))
    made.start_attempt({})
    made.log_path(0).write_text("step 1\n")
    fake_slurm.answer("squeue", "exit 0")
    found = run_status(made)
    assert found.state == "failed" and "Slurm reports FAILED (lost" in str(found.error)
    assert cancel_run(made).state == "FAILED" and fake_slurm.calls("scancel") == []


def test_an_error_of_scancel_is_one_line(tmp_path: Path, fake_slurm: Any) -> None:
    made = RunDirectory.create(tmp_path / "r", slurm={"job_id": 7, "submitted": time.time()})
    fake_slurm.answer("scancel", "echo 'scancel: error: Kill job error on job id 7: Access denied' >&2; exit 1")
    with pytest.raises(SubmissionError, match=r"scancel 7: .*Access denied; check that"):
        cancel_run(made)


def test_only_a_job_with_the_runs_own_batch_script_is_cancelled(tmp_path: Path, fake_slurm: Any) -> None:
    copied = RunDirectory.create(tmp_path / "r", slurm={"job_id": 7, "submitted": time.time()})
    row = SEPARATOR.join(["7", "RUNNING", str(int(time.time())), "None", "ib1", "x"])
    own_script = copied.path / "submission" / ".submission_file_1.sh"
    own_script.parent.mkdir(exist_ok=True)
    own_script.touch()
    for script in ("/home/thesis/submission/.submission_file_1.sh", "(null)"):
        fake_slurm.answer("squeue", f"case $* in *'=%i %o') echo '7 {script}';; *) echo '{row}';; esac")
        with pytest.raises(SubmissionError, match=r"job 7 is not in this run's directory.*`scancel 7`"):
            cancel_run(copied)
    assert fake_slurm.calls("scancel") == []
    fake_slurm.answer("squeue", f"case $* in *'=%i %o') echo '7 {own_script}';; *) echo '{row}';; esac")
    fake_slurm.answer("scancel", "exit 0")
    cancel_run(copied)
    assert fake_slurm.calls("scancel") == [["7"]]


def test_an_unreadable_run_does_not_hide_the_others(run: RunDirectory, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "run.yaml").write_text("{")
    assert [s.state for s in run_statuses([RunDirectory(bad), run])] == ["unreadable", "not_submitted"]
    with pytest.raises(RecordError):
        run_status(RunDirectory(bad))


def test_settings_reach_their_components(tmp_path: Path) -> None:
    settings = make(
        SlurmSettings,
        {
            "account": "ml",
            "timeout_min": 90,
            "setup": ["module load x"],
            "gres": None,
            "exclusive": True,
            "additional": {"switches": 1},
            "container": None,
            "pools": {"eth-a": {"qos": "slow", "account": "net", "additional": {"licenses": "x:1"}}},
        },
        "slurm",
    )
    plan = plans.plan("ib-a", "eth-a")
    ib, eth = plan_components(plan, settings)
    assert (ib.account, ib.qos, eth.account, eth.qos) == ("ml", None, "net", "slow")
    assert dict(eth.additional) == {"switches": 1, "licenses": "x:1"} and ib.exclusive is True
    text = plan_executor(plan, tmp_path / "x", settings).job_script()
    assert "--time=90" in text and "module load x" in text and "#SBATCH --requeue" in text
    assert text == plan_executor(plan, tmp_path / "x", settings).job_script()  # --dry-run is reproducible


def test_nodes_of_another_architecture_need_their_own_python() -> None:
    """A heterogeneous job would start this Python there."""
    ib, *others = plans.site().pools
    names, line = ("n1", "n2", "n3", "n4"), "n[1-4]: riscv64, not x86_64: set slurm.pools.POOL.python"
    mixed = replace(plans.site(), pools=(replace(ib, node_names=names), *others), assumptions=(line,))
    plan = Plan.from_dict(plans.plan("ib-a", "eth-a", site=mixed).to_dict())
    for values in ({}, {"container": "all.sif", "pools": {"ib-a": {"container": ""}}}):
        message = r"pool ib-a: its nodes are riscv64.*; set slurm\.pools\.ib-a\.python"
        with pytest.raises(SubmissionError, match=message):
            plan_components(plan, make(SlurmSettings, values, "slurm"))
    for values in ({"container": "all.sif"}, {"pools": {"ib-a": {"python": "/opt/python"}}}):
        assert len(plan_components(plan, make(SlurmSettings, values, "slurm"))) == 2
    assert len(plan_components(plans.plan("eth-a", site=mixed), SlurmSettings())) == 1


def test_setup_runs_before_the_first_python(tmp_path: Path) -> None:
    plan, settings = plans.plan("ib-a", "eth-a"), SlurmSettings(setup=("module load python",))
    scripts = {
        plan_executor(plan, tmp_path / "x", settings).job_script(): "lifecycle.batch_end",
        plan_script(plan, tmp_path / "plan.yaml", "runs/x", settings, []): "lifecycle.batch_start",
    }
    for text, first_python in scripts.items():
        setup, python = text.index("\nmodule load python\n"), text.index(first_python)
        assert text.find(START_MARK) < setup < python and "python" not in text[:setup].partition("#SBATCH")[2]


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"acount": "x"}, "did you mean 'account'"),
        ({"pools": {"ib-z": {}}}, "no pool 'ib-z'"),
        ({"pools": {"ib-a": {"timeout_min": 3}}}, "slurm.pools.ib-a: unknown key 'timeout_min'"),
        ({"pools": {"ib-a": {"qosx": 3}}}, "did you mean 'qos'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises((SubmissionError, ConfigError), match=error):
        plan_components(plans.plan("ib-a", "eth-a"), make(SlurmSettings, settings, "slurm"))


def test_gpus_are_requested_if_slurm_has_them_as_gres() -> None:
    with_gpus = plans.plan("ib-a", site=plans.site(gres=True))
    assert plan_components(with_gpus, SlurmSettings())[0].gpus_per_node == 1
    assert plan_components(plans.plan("ib-a"), SlurmSettings())[0].gpus_per_node is None
    part = plan_components(with_gpus, SlurmSettings(gres="gpu:a100:1"))[0]
    assert part.gres == "gpu:a100:1" and part.gpus_per_node is None


def test_the_gpu_type_of_slurms_gres_is_requested() -> None:
    plan = one_node_plan(gpus_per_node=4, gres_type="a100")
    assert "--gpus-per-node=a100:4" in plan_components(plan, SlurmSettings())[0].arguments()
    (part,) = plan_components(plan, SlurmSettings(gres="gpu:4"))
    assert part.gres == "gpu:4" and part.gpus_per_node is None
    (part,) = plan_components(plan, SlurmSettings(additional={"gpus_per_node": 4}))
    assert "--gpus-per-node=4" in part.arguments() and "--gpus-per-node=a100:4" not in part.arguments()


def one_node_plan(**changes: Any) -> Plan:
    """Return a plan on a node, with all its eight GPUs or `gpus_per_node` of them."""
    one = plans.site(gres=True).pool("ib-a")
    gpus = changes.pop("gpus_per_node", 8)
    fabric = replace(one, gpus_per_node=gpus, **{"node_cpus": 128, "node_memory_gib": 1000.0, **changes})
    return plans.plan("ib-a", nodes=1, site=replace(plans.site(), pools=(fabric,)))


@pytest.mark.parametrize(
    ("plan", "settings", "cpus", "mem"),
    [
        (one_node_plan(), {}, 16, "0"),
        (one_node_plan(gpus_per_node=2, node_gpus=8), {}, 16, "256000M"),  # a part of the node
        (one_node_plan(gpus_per_node=2, node_gpus=8), {"exclusive": True}, 64, "0"),
        (one_node_plan(node_cpus=126), {}, 14, "0"),  # whole cores
        (one_node_plan(node_cpus=4), {}, 1, "0"),
        (one_node_plan(node_cpus=None, node_memory_gib=None), {}, None, "0"),
        (one_node_plan(), {"cpus_per_task": 3, "mem": "64G"}, 3, "64G"),
        (one_node_plan(), {"pools": {"ib-a": {"mem": "1G"}}}, 16, "1G"),
        (one_node_plan(), {"share": False}, None, None),
        (one_node_plan(), {"pools": {"ib-a": {"share": False}}}, None, None),
        (one_node_plan(), {"share": False, "pools": {"ib-a": {"share": True}}}, 16, "0"),
        (one_node_plan(), {"additional": {"mem-per-gpu": "90G"}}, 16, None),  # Slurm accepts one of the two
        (one_node_plan(), {"additional": {"cpus_per_gpu": 8}}, None, "0"),
    ],
)
def test_a_job_requests_the_share_of_cpus_and_memory_of_its_gpus(
    plan: Plan, settings: dict[str, Any], cpus: int | None, mem: str | None
) -> None:
    (part,) = plan_components(plan, make(SlurmSettings, settings, "slurm"))
    assert (part.cpus_per_task, part.mem) == (cpus, mem)


def test_a_job_without_gpus_requests_no_cpus_or_memory() -> None:
    (part,) = plan_components(plans.plan("ib-a"), SlurmSettings())
    assert part.cpus_per_task is None and part.mem is None


@pytest.mark.parametrize(
    ("settings", "is_exclusive"), [({}, True), ({"exclusive": False}, False), ({"share": False}, False)]
)
def test_a_job_gets_whole_nodes_if_slurm_lists_no_gpus_of_theirs(settings: dict[str, Any], is_exclusive: bool) -> None:
    (part,) = plan_components(one_node_plan(gres=False, gpu=A100), make(SlurmSettings, settings, "slurm"))
    assert ("--exclusive" in part.arguments()) == is_exclusive and part.mem is None


def test_a_job_avoids_the_nodes_that_the_pool_and_the_settings_exclude() -> None:
    assert plan_components(one_node_plan(), SlurmSettings(exclude="n7"))[0].exclude == "n7"
    settings = SlurmSettings(exclude=("n7", "n8"), additional={"exclude": "n5"})
    assert plan_components(one_node_plan(exclude="n9"), settings)[0].exclude == "n9,n7,n8,n5"
    assert plan_components(one_node_plan(), SlurmSettings())[0].exclude is None


def test_the_script_sets_the_distribution_of_ranks(tmp_path: Path) -> None:
    text = plan_executor(one_node_plan(), tmp_path / "x", SlurmSettings()).job_script()
    assert "--distribution=block:block --cpus-per-task=16" in text
    for line in ("--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=16", "--mem=0"):
        assert f"#SBATCH {line}\n" in text
    assert (
        "--distribution=block:cyclic"
        in plan_executor(one_node_plan(), tmp_path / "x", SlurmSettings(distribution="block:cyclic")).job_script()
    )
    with pytest.raises(ConfigError, match="use block:block, block:cyclic"):
        SlurmSettings(distribution="cyclic")  # ranks would be in other components


# -- local processes -------------------------------------------------------------------------------------------------


def rank_here(config: dict[str, Any]) -> dict[str, Any]:
    rank, run = int(os.environ["RANK"]), RunDirectory(config["run_dir"])
    print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
    if rank == 0:
        run.start_attempt({})
        run.append_metrics({"step": 1, "loss": 0.5, "attempt": 1})
    if config.get("die") == rank:
        while not run.metrics():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    while config.get("die") is not None and not run.metrics():
        time.sleep(0.05)
    run.write_exit(rank, "completed")
    return {"loss": 0.5}


def here(tmp_path: Path, **config: Any) -> RunDirectory:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    plan = plans.local_plan()
    run = RunDirectory.create(tmp_path / "run", plan_text=plan.to_yaml(), config={**plans.CONFIG, **config})
    job = run_plan_locally(PlannedJob(plan, run.config, rank_here, SlurmSettings(timeout_min=1)), run.path)
    code = report_progress(run, job, poll_s=0.1)
    assert code == (0 if config.get("die") is None else 1)
    return run


def test_a_plan_runs_as_local_processes(tmp_path: Path) -> None:
    run = here(tmp_path)
    result = run.read_result()
    assert result is not None and result["state"] == "completed" and result["final"]["loss"] == 0.5
    assert [p.name for p in log_paths(run)] == ["rank-0.txt", "rank-1.txt"]
    assert "rank 1 of 2" in run.log_path(1).read_text()
    assert run_status(run).state == "completed" and job_of(run).state().state == "COMPLETED"


def test_a_killed_local_rank_is_reported(tmp_path: Path) -> None:
    run = here(tmp_path, die=1)
    found = run_status(run)
    assert (found.state, found.failed_rank) == ("failed", 1)
    assert found.error == "rank 1 died: killed by signal 9 (SIGKILL: kill -9, or the kernel for lack of memory)"


def wait_for_signal(config: dict[str, Any]) -> None:
    rank, run = int(os.environ["RANK"]), RunDirectory(config["run_dir"])
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2) if config.get("saves") else ():
        signal.signal(number, lambda number, _: received.append(number))
    if rank == 0:
        run.start_attempt({})
    (run.path / f"here-{rank}").touch()
    while not received:
        time.sleep(0.05)
    run.write_exit(rank, "preempted", signal=signal.Signals(received[0]).name)


@pytest.mark.parametrize(
    "number, saves, state",
    [(signal.SIGTERM, False, "cancelled"), (signal.SIGTERM, True, "cancelled"), (signal.SIGUSR2, True, "preempted")],
)
def test_the_state_of_a_local_run_ended_by_a_signal(
    tmp_path: Path, number: signal.Signals, saves: bool, state: str
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    plan = plans.local_plan()
    run = RunDirectory.create(tmp_path / "run", plan_text=plan.to_yaml(), config={**plans.CONFIG, "saves": saves})
    job = run_plan_locally(PlannedJob(plan, run.config, wait_for_signal, SlurmSettings(timeout_min=1)), run.path)
    while len(list(run.path.glob("here-*"))) < 2:
        time.sleep(0.05)
    ranks = psutil.Process(int(job.id)).children()[0]  # the process that forked them
    os.kill(ranks.pid if number == signal.SIGUSR2 else int(job.id), number)  # its controller passes on SIGTERM only
    assert report_progress(run, job, poll_s=0.1) == 1
    assert run_status(run).state == state
    assert cancel_run(run).state == state.upper()


def wait_for_file(config: dict[str, Any]) -> None:
    rank, run = int(os.environ["RANK"]), RunDirectory(config["run_dir"])
    if rank == 0:
        run.start_attempt({})
        run.append_metrics({"step": 1, "loss": 0.5, "attempt": 1})
    while not (Path(run.path) / "go").exists():
        time.sleep(0.05)
    run.write_exit(rank, "completed")


@pytest.mark.parametrize("action", ["cancel", "go"])
def test_a_local_run_ignores_ctrl_c_and_can_be_cancelled(tmp_path: Path, action: str) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    run = RunDirectory.create(tmp_path / "run", plan_text=plans.local_plan().to_yaml(), config=plans.CONFIG)
    job = run_plan_locally(
        PlannedJob(plans.local_plan(), run.config, wait_for_file, SlurmSettings(timeout_min=1)), run.path
    )
    while not run.metrics():
        time.sleep(0.05)
    os.kill(int(job.id), signal.SIGINT)  # as a terminal does to all its processes
    time.sleep(0.3)
    assert job.state().state == "RUNNING" and run_status(run).state == "running"
    if action == "cancel":
        assert cancel_run(run).state == "RUNNING"
    else:
        (run.path / "go").touch()
    assert report_progress(run, job, poll_s=0.1) == (action == "cancel")
    assert run_status(run).state == ("cancelled" if action == "cancel" else "completed")


def test_cancelling_without_slurm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Answer(1, "", "scancel: error: Unable to contact slurm controller (connect failure)\n")
    monkeypatch.setattr("holmes_hpc.submission.executor.job.slurm_with_retries", lambda *_, **__: unreachable)
    with pytest.raises(SubmissionError, match=r"scancel 7: .*Unable to contact slurm controller.*; .*scontrol ping"):
        SlurmJob(tmp_path / "submission", "7").cancel()
