"""The outcome of a run: its state, the rank that failed, and whether the job restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import UncompletedJobError

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import Answer
from holmes_hpc.slurm.job_states import JobState, read_cancellation
from holmes_hpc.submission.executor.environment import ComponentRanks, SlurmHetJobEnvironment
from holmes_hpc.submission.lifecycle import batch_end, outcome, requeue_decision
from holmes_hpc.submission.lifecycle.attempts import has_new_steps, record_attempt_end
from holmes_hpc.submission.lifecycle.batch_end import end_attempt
from holmes_hpc.submission.lifecycle.failed_rank import find_failed_rank, parse_srun_errors
from holmes_hpc.submission.lifecycle.outcome import build_result, last_log_lines, quote_log
from holmes_hpc.submission.lifecycle.progress import report_end
from holmes_hpc.submission.lifecycle.requeue_decision import reason_to_stop
from holmes_hpc.submission.lifecycle.status import record_end

UNREACHABLE_TWICE = """
[ "$1" = requeue ] || exit 1
n=$(cat "$0.count" 2>/dev/null || echo 0); n=$((n+1)); echo $n > "$0.count"
[ $n -gt 2 ] || { echo "slurm_requeue error: Unable to contact slurm controller (connect failure)" >&2; exit 1; }"""
KILLED = """\
srun: error: roce1: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=8.0
slurmstepd: error: *** STEP 8.0 ON ib1 CANCELLED AT 2024-01-01T00:00:00 ***
srun: error: ib1: task 0: Exited with exit code 1
srun: error: ib[2-3]: tasks 1,3: Terminated
"""
SIGKILLED = "killed by signal 9 (SIGKILL: kill -9, or the kernel for lack of memory)"  # the message of a local rank


def exits(*records: tuple[int, str, str]) -> list[dict[str, Any]]:
    return [{"rank": r, "state": s, "error": e, "host": f"n{r}", "time": i} for i, (r, s, e) in enumerate(records)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "run", config={"train": {"max_restarts": 2}})
    made.start_attempt({})
    return made


def test_srun_errors_are_parsed() -> None:
    assert [(e.rank, e.node, e.error) for e in parse_srun_errors(KILLED)] == [
        (2, "roce1", SIGKILLED),
        (0, "ib1", "Exited with exit code 1"),
        (1, "ib2", "Terminated"),
        (3, "ib3", "Terminated"),
    ]
    several = parse_srun_errors("srun: error: eth1: tasks 4-6: Exited with exit code 1")
    assert [(e.rank, e.node) for e in several] == [(4, "eth1"), (5, "eth1"), (6, "eth1")]


PARTS = [ComponentRanks(("ib1", "ib2"), 0, 2), ComponentRanks(("roce1",), 4, 2), ComponentRanks(("eth1", "eth2"), 6, 1)]


@pytest.mark.parametrize(
    "line, ranks",
    [
        ("srun: error: roce1: task 1: Killed", (5,)),
        ("srun: error: eth2: task 1: Terminated", (7,)),
        ("srun: error: ib2: tasks 2-3: Terminated", (2, 3)),
        ("srun: error: roce1: task 5: Killed", (5,)),
        ("srun: error: eth[1-2]: tasks 0-1: Killed", (6, 7)),
    ],
)
def test_tasks_of_a_component_become_global_ranks(line: str, ranks: tuple[int, ...]) -> None:
    assert tuple(e.rank for e in parse_srun_errors(line, PARTS)) == ranks


@pytest.mark.parametrize(
    "text, state",
    [
        ("slurmstepd: error: *** JOB 34 ON ib1 CANCELLED AT 2026-11-20T20:04:05 DUE TO TIME LIMIT ***", "TIMEOUT"),
        ("slurmstepd: error: *** JOB 34 ON ib1 CANCELLED AT 2026-11-20T20:04:05 ***", "CANCELLED"),
        ("slurmstepd: error: *** JOB 34 ON ib1 CANCELLED AT 2026-11-20T20:04:05 DUE TO PREEMPTION ***", "PREEMPTED"),
        ("slurmstepd: error: *** STEP 34.0 ON ib1 CANCELLED AT 2026-11-20T20:04:05 ***", None),
        ("slurmstepd: error: *** STEP 34+0.0 ON ib1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", "TIMEOUT"),
    ],
)
def test_slurmds_message_gives_the_state(text: str, state: str | None) -> None:
    found = read_cancellation(text)
    assert (found.state if found else None) == state


def test_a_killed_rank_is_the_failed_one_not_its_peers() -> None:
    records = exits(
        (0, "failed", "NetworkError: Connection closed by peer [10.0.0.3]"), (1, "failed", "connection reset")
    )
    found = find_failed_rank(records, parse_srun_errors(KILLED))
    assert (found.rank, found.node) == (2, "roce1") and found.error == f"rank 2 died: {SIGKILLED}"


def test_a_rank_that_never_joined_is_the_failed_one() -> None:
    absence = "rendezvous: rank 2 (roce1) did not join; look at their logs"
    found = find_failed_rank(exits((0, "failed", absence)), parse_srun_errors(KILLED))
    assert (found.rank, found.node) == (2, "roce1")
    assert found.error == f"rank 2 died: {SIGKILLED}; rank 0 on n0: {absence}"


def test_a_rank_with_its_own_error_failed_first() -> None:
    both = exits((3, "failed", "connection reset by peer"), (1, "failed", "ValueError: bad"))
    found = find_failed_rank(both, parse_srun_errors(KILLED))
    assert (found.rank, found.node, found.error) == (1, "n1", "ValueError: bad")


def test_a_failed_node_comes_before_tasks_that_srun_terminated() -> None:
    text = (
        "srun: error: Node failure on eth2\nsrun: Job step aborted\n"
        "srun: error: ib2: task 2: Terminated\nsrun: error: roce1: tasks 0-1: Terminated\n"
    )
    found = find_failed_rank([], parse_srun_errors(text, PARTS), ranks=8)
    assert (found.rank, found.node, found.error) == (7, "eth2", "node eth2 failed")


def test_a_rank_without_an_exit_record_failed() -> None:
    done = exits((0, "completed", ""), (1, "completed", ""))
    srun_errors = parse_srun_errors("srun: error: roce1: task 0: Exited with exit code 1", PARTS)
    found = find_failed_rank(done, srun_errors, ranks=4)
    assert (found.rank, found.node) == (4, "roce1")


def test_a_rank_without_record_failed_if_srun_reports_nothing() -> None:
    peer_exits = exits((0, "failed", "Connection reset by peer"), (2, "failed", "Connection reset by peer"))
    found = find_failed_rank(peer_exits, [], ranks=3, hosts=["ib1", "ib2", "roce1"])
    assert (found.rank, found.node) == (1, "ib2")
    assert found.error is not None and found.error.startswith("rank 1 exited without an exit record; rank ")
    assert str(peer_exits[0]["error"]) in found.error


def test_node_of_one_of_several_tasks() -> None:
    found = find_failed_rank([], parse_srun_errors("srun: error: ib[2-3]: tasks 1,3: Segmentation fault"))
    assert (found.rank, found.node) == (1, "ib2")


@pytest.mark.parametrize(
    "status, signalled, slurm, records, state",
    [
        (0, False, None, [], "completed"),
        (1, False, None, [], "failed"),
        (143, True, None, [], "cancelled"),
        (137, True, "TIMEOUT", [], "timeout"),
        (143, True, "PREEMPTED", [], "preempted"),
        (0, True, None, [(0, "preempted", "")], "cancelled"),
        (0, True, "TIMEOUT", [(0, "preempted", "")], "timeout"),
        (0, False, None, [(0, "preempted", "")], "preempted"),
        (1, False, None, [(0, "preempted", "")], "preempted"),
        (None, False, "COMPLETED", [], "completed"),
        (None, False, "NODE_FAIL", [], "failed"),
        (143, True, "NODE_FAIL", [], "failed"),
        (None, False, "CANCELLED", [], "cancelled"),
        (1, True, "RUNNING", [(1, "failed", "x")], "failed"),
    ],
)
def test_the_state_of_a_run(
    run: RunDirectory,
    status: int | None,
    signalled: bool,
    slurm: str | None,
    records: list[tuple[int, str, str]],
    state: str,
) -> None:
    for rank, exit_state, error in records:
        run.write_exit(rank, exit_state, error)
    job_state = JobState(slurm, "", "ib1", components=(slurm,)) if slurm else None
    result = build_result(run, status, signalled=signalled, slurm=job_state)
    assert result["state"] == state
    assert (result["exit_code"] == 0) == (state == "completed")
    if slurm == "NODE_FAIL":
        assert "NODE_FAIL" in result["error"] and "ib1" in result["error"]


def test_the_error_of_a_cancelled_run_names_the_signal(run: RunDirectory) -> None:
    run.write_exit(0, "preempted", signal=None)
    run.write_exit(1, "preempted", signal="SIGTERM")
    assert build_result(run, 143, signalled=True)["error"] == "its ranks received SIGTERM"


def test_a_local_run_at_its_limit_names_the_limit(run: RunDirectory) -> None:
    run.write_exit(0, "preempted", signal="SIGUSR2")
    ended = JobState("COMPLETED", "", "here", 0, source="process")
    assert build_result(run, 0, slurm=ended)["error"] == "time limit reached (slurm.timeout_min)"
    assert build_result(run, 0, slurm=replace(ended, source="sacct"))["error"] == "its ranks received SIGUSR2"


def test_the_result_has_the_last_lines_of_the_failed_ranks_log(run: RunDirectory) -> None:
    run.log_path(2).write_bytes(b"x\n" * 3000 + b"\xff last line\n")
    found = build_result(run, 137, srun_errors=parse_srun_errors(KILLED))
    assert (found["failed_rank"], found["failed_node"]) == (2, "roce1")
    assert found["log_tail"][-1].endswith("last line") and len(found["log_tail"]) == 20
    assert last_log_lines(run.log_path(77)) == []


def test_the_log_of_a_rank_other_than_0_is_quoted_with_a_hint() -> None:
    lines = ["2026-01-01 10:00:00.000 step 21: 0.3 s, compute 0.2", "boom"]
    assert quote_log(lines, "boom", 0) == quote_log(lines, "boom") == [f"  | {lines[0]}"]
    assert quote_log(lines, "", 3)[2:] == ["  (ranks other than 0 log every 20th step: it may have made more)"]
    assert quote_log(["boom"], "", 3) == ["  | boom"]


def test_the_log_of_an_earlier_job_is_not_quoted(run: RunDirectory) -> None:
    run.update_run(slurm={"job_id": 8})
    first = "holmes: start of job 7, restart 0\nsrun: error: ib1: task 1: Killed\nholmes: failed: rank 1 died\n"
    batch = run.logs / "batch.txt"
    batch.parent.mkdir(exist_ok=True)
    batch.write_text(first)
    (run.logs / "srun.txt").write_text("srun: error: ib1: task 1: Killed\n")
    cancelled = JobState("CANCELLED", "", "ib1", components=("CANCELLED",))
    assert build_result(run, None, slurm=cancelled)["log_tail"] == []  # cancelled while it was pending
    failed = record_end(run, JobState("NODE_FAIL", "", "ib1", components=("NODE_FAIL",)))
    assert failed["failed_rank"] is None and failed["log_tail"] == []
    batch.write_text(first + "holmes: start of job 8, restart 0\nslurmstepd: error: *** JOB 8 ON ib1 CANCELLED ***\n")
    found = build_result(run, 143, signalled=True, slurm=cancelled)
    assert found["state"] == "cancelled" and found["log_tail"] == ["slurmstepd: error: *** JOB 8 ON ib1 CANCELLED ***"]
    assert "task 1" not in batch_end.end_messages(run).partition("JOB 8")[0]


NO_NEW_STEP = "no new step since the last start"


def test_restarts_stop_without_a_new_step(run: RunDirectory) -> None:
    assert [reason_to_stop(run, state, "7/0") for state in ("failed", "preempted", "timeout")] == [NO_NEW_STEP] * 3
    assert reason_to_stop(run, "preempted", "7/0", slurm_requeues=True) is None  # Slurm requeues it itself
    run.append_metrics({"step": 5, "attempt": 1})
    assert reason_to_stop(run, "failed", "7/0") is None
    assert reason_to_stop(run, "cancelled", "7/0") == "cancelled"
    record_attempt_end(run, "7/0", "failed")
    assert not has_new_steps(run, "7/1")  # rank 0 did not start in it
    run.start_attempt({})
    run.append_metrics({"step": 5, "attempt": 2})  # the same step again
    assert not has_new_steps(run, "7/1")
    run.append_metrics({"step": 6, "attempt": 2})
    assert has_new_steps(run, "7/1")


def test_failures_alone_count_against_max_restarts(run: RunDirectory) -> None:
    """They are counted per job: `holmes resume` submits another one."""
    for number, ended in enumerate(["preempted", "failed", "timeout", "failed", "preempted"]):
        run.append_metrics({"step": number, "attempt": number + 1})
        assert reason_to_stop(run, ended, f"7/{number}") is None
        record_attempt_end(run, f"7/{number}", ended)
        run.start_attempt({})
    run.append_metrics({"step": 9, "attempt": 6})
    assert reason_to_stop(run, "failed", "7/5") == "already restarted after 2 failures"
    assert reason_to_stop(run, "timeout", "7/5") is None and reason_to_stop(run, "failed", "8/0") is None


@pytest.mark.parametrize("state, restarts", [("preempted", True), ("timeout", True), ("failed", False)])
def test_without_restarts_only_failures_end_the_run(tmp_path: Path, state: str, restarts: bool) -> None:
    run = RunDirectory.create(tmp_path / "none", config={"train": {"max_restarts": 0}})
    run.start_attempt({})
    run.append_metrics({"step": 1, "attempt": 1})
    assert reason_to_stop(run, state, "7/0") == (None if restarts else "train.max_restarts is 0")


@pytest.mark.integration
@pytest.mark.parametrize("restarts, code", [(0, 1), (2, 0)])
def test_slurm_restarts_a_job_whose_node_failed(
    tmp_path: Path, restarts: int, code: int, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answer("scontrol", "echo ExpeditedRequeue=Yes")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = RunDirectory.create(tmp_path / "run", config={"train": {"max_restarts": restarts}})
    words = [str(run.path), "1", "", "--again"]
    assert batch_end.main(words) == 0  # nothing ran yet
    run.start_attempt({})
    run.append_metrics({"step": 1, "attempt": 1})
    assert batch_end.main(words) == code
    result = run.read_result()
    assert (result is not None) == bool(code) and (not code or "exited without a record" in result["error"])  # type: ignore[index]
    assert (["update", "JobId=7", "Requeue=0"] in fake_slurm.calls("scontrol")) == bool(code)
    assert batch_end.main(words) == 0  # its end is recorded: somebody restarted it on purpose
    if not code:
        assert run.read_run()["attempts"][0]["start"] == "7/0" and not has_new_steps(run, "7/1")


@pytest.mark.integration
def test_a_requeue_that_rank_0_requested_is_no_failure(run: RunDirectory, fake_slurm: Any) -> None:
    fake_slurm.answer("scontrol", 'echo "scontrol: error: Job is pending execution" >&2; exit 1')
    run.append_metrics({"step": 1, "attempt": 1})
    record_attempt_end(run, "23/0", "preempted")
    end_attempt(run, 255, False, "23", 0)
    assert run.read_result() is None and run.read_run()["attempts"][0]["ended"] == "preempted"


@pytest.mark.integration
def test_a_requeue_is_retried_while_the_controller_is_unreachable(run: RunDirectory, fake_slurm: Any) -> None:
    fake_slurm.answer("scontrol", UNREACHABLE_TWICE)
    run.append_metrics({"step": 1, "attempt": 1})
    assert end_attempt(run, 1, False, "23", 0) == 1
    assert fake_slurm.calls("scontrol").count(["requeue", "23"]) == 3 and run.read_result() is None


@pytest.mark.integration
@pytest.mark.parametrize("max_requeues, restarts, error", [(0, 9, ""), (2, 1, ""), (2, 2, "already requeued 2 times")])
def test_submitits_requeue_retries_and_keeps_its_limit(
    max_requeues: int, restarts: int, error: str, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLMES_LEADER_JOB_ID", "23")
    monkeypatch.setenv("HOLMES_MAX_REQUEUES", str(max_requeues))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    fake_slurm.answer("scontrol", UNREACHABLE_TWICE)
    if error:
        with pytest.raises(UncompletedJobError, match=error):
            SlurmHetJobEnvironment()._requeue(3)
    else:
        SlurmHetJobEnvironment()._requeue(3)
    assert fake_slurm.calls("scontrol") == [["requeue", "23"]] * (0 if error else 3)


@pytest.mark.integration
def test_a_refused_requeue_is_reported(fake_slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_LEADER_JOB_ID", "23")
    fake_slurm.answer("scontrol", 'echo "Requested operation is presently disabled" >&2; exit 1')
    with pytest.raises(UncompletedJobError, match="presently disabled"):
        SlurmHetJobEnvironment()._requeue(3)


@pytest.mark.integration
def test_the_end_of_an_attempt_is_a_requeue_or_a_result(run: RunDirectory, fake_slurm: Any) -> None:
    fake_slurm.answer("scontrol", 'case "$1" in requeue) exit 0;; *) exit 1;; esac')
    run.append_metrics({"step": 1, "attempt": 1, "loss": 2.5})
    assert end_attempt(run, 1, False, "23", 0) == 1
    assert ["requeue", "23"] in fake_slurm.calls("scontrol") and run.read_result() is None
    for restart in (1, 2):
        run.start_attempt({})
        run.append_metrics({"step": 1 + restart, "attempt": 1 + restart, "loss": 2.5})
        assert end_attempt(run, 1, False, "23", restart) == 1
    result = run.read_result()
    assert result is not None and result["state"] == "failed" and result["writer"] == "batch"
    assert result["final"]["loss"] == 2.5
    assert len([c for c in fake_slurm.calls("scontrol") if c[0] == "requeue"]) == 2


@pytest.mark.integration
@pytest.mark.parametrize("shown, updates", [("ExpeditedRequeue=Yes", [["update", "JobId=23", "Requeue=0"]]), ("", [])])
def test_an_expedited_job_without_restarts_is_not_requeued(
    shown: str, updates: list[list[str]], tmp_path: Path, fake_slurm: Any
) -> None:
    fake_slurm.answer("scontrol", f'echo "JobId=23 JobState=RUNNING {shown}"')
    run = RunDirectory.create(tmp_path / "none", config={"train": {"max_restarts": 0}})
    assert end_attempt(run, 1, False, "23", 0) == 1
    assert [call for call in fake_slurm.calls("scontrol") if call[0] == "update"] == updates


@pytest.mark.integration
def test_a_run_of_several_jobs_fails_even_if_one_was_preempted_before(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLMES_LEADER_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "")  # as the coordinator sets it
    message = "slurmstepd: error: *** JOB 8 ON roce1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n"
    run.logs.mkdir(exist_ok=True)
    (run.logs / "batch.txt").write_text(message)
    run.write_exit(1, "failed", "no data")
    assert batch_end.main([str(run.path), "1", ""]) == 1
    result = run.read_result()
    assert result is not None and (result["state"], result["failed_rank"]) == ("failed", 1)
    assert "not restarted: no new step since the last start" in capfd.readouterr().out


def test_a_missing_run_directory_is_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert batch_end.main([str(tmp_path / "nothing"), "0", ""]) == 1
    assert "cannot record the end" in capfd.readouterr().out


def test_result_is_json_with_all_keys(run: RunDirectory) -> None:
    batch_end.main([str(run.path), "0", ""])
    data = json.loads(run.result_path.read_text())
    assert {"state", "exit_code", "error", "failed_rank", "failed_node", "log_tail", "final"} <= data.keys()


@pytest.mark.parametrize(
    "memory",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Step 7.0 exceeded memory limit (1532 > 1024), being killed",
    ],
)
def test_a_rank_killed_for_its_memory_is_reported_so(memory: str) -> None:
    killed = "srun: error: ib1: task 1: Killed\nsrun: error: ib2: task 0: Terminated\n"
    first, second = parse_srun_errors(f"{memory}\n{killed}")
    assert first.error == f"killed by signal 9 (SIGKILL): out of memory ({memory})"
    assert find_failed_rank([], [second, first]).rank == 1 and second.error == "Terminated"
    assert parse_srun_errors(killed)[0].error == SIGKILLED


@pytest.mark.parametrize(("states", "is_cancelled"), [("RUNNING\nPENDING\n", True), ("RUNNING\nRUNNING\n", False)])
def test_a_component_that_slurm_requeued_ends_with_an_elastic_run(
    states: str, is_cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run", config={"elastic": {"enabled": True}}, slurm={"job_id": 23})
    run.start_attempt()
    commands = list[tuple[str, ...]]()
    answers = {"squeue": states, "scancel": ""}
    monkeypatch.setattr(
        batch_end, "slurm", lambda *words, **_: commands.append(words) or Answer(0, answers[words[0]], "")
    )
    assert end_attempt(run, 0, False, "23", 0) == 0
    assert (("scancel", "23") in commands) == is_cancelled


def test_full_disk_that_left_no_exit_record_is_the_cause(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.append_metrics({"step": 1})
    monkeypatch.setattr(outcome, "is_full", lambda path: True)
    result = build_result(run, 1)
    assert result["error"] == f"{run.path}: No space left on device; free some space and try again"
    report_end(run, result)
    assert "resume" not in capsys.readouterr().err  # there is no checkpoint
    run.write_exit(1, "failed", "Out of memory")
    assert build_result(run, 1)["error"] == "Out of memory"


@pytest.mark.parametrize(
    ("reason", "code", "node"), [("PREEMPTION", 0, None), ("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", 1, "ib2")]
)
def test_only_a_preempted_job_goes_on_if_nobody_recorded_its_end(
    tmp_path: Path, monkeypatch, reason: str, code: int, node: str | None
) -> None:
    monkeypatch.setattr(requeue_decision, "disable_requeue", lambda job_id: None)
    run = RunDirectory.create(tmp_path / "run", config={"train": {"max_restarts": 0}}, slurm={"job_id": 5})
    run.start_attempt({"job_id": 5})
    (run.logs / "batch.txt").write_text("holmes: start of job 5, restart 0\nholmes: start of job 5, restart 1\n")
    failure = f"srun: error: Node failure on {node}\n" if node else ""
    message = f"slurmstepd-ib1: error: *** STEP 5.0 ON ib1 CANCELLED AT 2026-01-01T00:00:00 DUE TO {reason} ***\n"
    (run.logs / "srun.txt").write_text(failure + message)
    assert requeue_decision.check_requeued_job(run, "5", 1) == code
    if node:
        result = run.read_result()
        assert (result["error"], result["failed_node"]) == (f"node {node} failed", node)
    else:
        assert run.read_run()["attempts"][-1]["ended"] == "preempted" and run.read_result() is None
