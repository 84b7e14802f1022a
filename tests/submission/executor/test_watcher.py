"""Job states from Slurm's answers: joined over components, correct after reuse of job ids and without a daemon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from slurm_text import sacct_line, squeue_line

from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.watcher import JobIdentity, StateWatcher, read_exit_record


class WatcherWithAnswers(StateWatcher):
    """A watcher with given answers: {command: text, or None for a daemon that is away}."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self.answers, self.queries = answers, []

    def _query(self, command: list[str]) -> Any:  # type: ignore[override]
        from holmes_hpc.slurm.commands import Answer

        self.queries.append(command)
        text = self.answers.get(command[0])
        return Answer(1, "", "Socket timed out") if text is None else Answer(0, text, "")


def test_one_query_for_all_jobs_of_the_process() -> None:
    watcher = WatcherWithAnswers({"sacct": "".join(sacct_line(str(i), "RUNNING") for i in range(200))})
    for i in range(200):
        watcher.register_job(str(i))
    for i in range(200):
        watcher._registered_at[str(i)] -= 60
    states = [watcher.get_state(str(i)) for i in range(200)]
    assert states == ["RUNNING"] * 200 and len(watcher.queries) == 1
    assert watcher.num_calls == 1


def test_finished_jobs_are_not_queried_again() -> None:
    watcher = WatcherWithAnswers({"sacct": sacct_line("1", "COMPLETED") + sacct_line("2", "RUNNING")})
    for job in "12":
        watcher.register_job(job)
    watcher.state_of("1", "force")
    time.sleep(0.002)
    watcher.state_of("2", "force")
    assert watcher.queries[-1][-1] == "--jobs=2"


@pytest.mark.parametrize(
    "answers, source",
    [
        ({"sacct": sacct_line("5", "RUNNING")}, "sacct"),
        ({"squeue": squeue_line("5", "RUNNING")}, "squeue"),
        ({"scontrol": "JobId=5 JobName=a UserId=r JobState=RUNNING SubmitTime=1000"}, "scontrol"),
    ],
)
def test_next_source_answers_when_one_is_away(answers: dict[str, str], source: str) -> None:
    watcher = WatcherWithAnswers(answers)
    nodes = "ib1" if source != "scontrol" else ""
    assert watcher.state_of("5", "force") == JobState(
        "RUNNING", "", nodes, None, ("RUNNING",), source, component_nodes=(nodes,)
    )


def test_without_answers_the_last_state_stays_until_the_exit_record(tmp_path: Path) -> None:
    answers: dict[str, Any] = {"sacct": sacct_line("5", "RUNNING")}
    watcher = WatcherWithAnswers(answers)
    record = tmp_path / "5_exit"
    watcher.set_identity("5", JobIdentity("a", 1000.0, record))
    assert watcher.state_of("5", "force").state == "RUNNING"
    answers.clear()
    time.sleep(0.002)
    assert watcher.state_of("5", "force").state == "RUNNING"
    record.write_text("1 1500 -\n")
    time.sleep(0.002)
    state = watcher.state_of("5", "force")
    assert (state.state, state.source, state.exit_code) == ("FAILED", "exit record", 1)


def test_pending_in_the_database_does_not_override_the_controller() -> None:
    answers: dict[str, Any] = {"squeue": squeue_line("5", "RUNNING"), "sacct": sacct_line("5", "PENDING")}
    watcher = WatcherWithAnswers(answers)
    assert watcher.state_of("5", "force").state == "RUNNING"
    answers["squeue"] = None
    watcher._down_until["squeue"] = time.monotonic() + 60
    time.sleep(0.002)
    assert watcher.state_of("5", "force").state == "RUNNING"
    answers["squeue"] = squeue_line("5", "PENDING", reason="BeginTime")  # requeued
    watcher._down_until.clear()
    time.sleep(0.002)
    assert watcher.state_of("5", "force").reason == "BeginTime"
    answers |= {"sacct": sacct_line("5", "FAILED"), "squeue": ""}
    time.sleep(0.002)
    assert watcher.state_of("5", "force").state == "FAILED"


def test_queries_continue_after_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"sacct": sacct_line("5", "RUNNING")}
    watcher, now = WatcherWithAnswers(answers), time.time()
    assert watcher.state_of("5", "force").state == "RUNNING"
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    answers["sacct"] = sacct_line("5", "COMPLETED")
    assert watcher.state_of("5").state == "COMPLETED"


def test_rows_of_another_job_with_the_same_id_are_ignored() -> None:
    identity, submitted = JobIdentity("mine", 5000.0), 5000.0
    watcher = WatcherWithAnswers({"sacct": sacct_line("5", "FAILED", submit=submitted - 86400, name="mine")})
    watcher.set_identity("5", identity)
    assert watcher.state_of("5", "force").state == "UNKNOWN"
    watcher = WatcherWithAnswers({"sacct": sacct_line("5", "FAILED", submit=submitted + 9, name="other")})
    watcher.set_identity("5", identity)
    assert watcher.state_of("5", "force").state == "UNKNOWN"
    watcher = WatcherWithAnswers({"sacct": sacct_line("5", "FAILED", submit=submitted - 1, name="mine")})
    watcher.set_identity("5", identity)
    assert watcher.state_of("5", "force").state == "FAILED"


def test_job_names_match_as_the_database_stores_them() -> None:
    watcher = WatcherWithAnswers({"sacct": sacct_line("5", "RUNNING", submit=5000, name="n `it`s`")})
    watcher.set_identity("5", JobIdentity('n "it\'s"', 5000.0))
    assert watcher.state_of("5", "force").state == "RUNNING"


def test_job_has_not_ended_while_rows_of_components_are_missing() -> None:
    watcher = WatcherWithAnswers({"sacct": sacct_line("5", "COMPLETED", submit=5000)})
    watcher.set_identity("5", JobIdentity("a", 5000.0, components=2))
    assert not watcher.is_done("5", "force")
    watcher.answers["sacct"] = sacct_line("5+0", "COMPLETED", submit=5000) + sacct_line("5+1", "FAILED", submit=5000)
    time.sleep(0.002)
    assert watcher.is_done("5", "force") and watcher.get_state("5", "cache") == "FAILED"


def test_exit_record_older_than_the_job_is_ignored(tmp_path: Path) -> None:
    record = tmp_path / "5_exit"
    record.write_text("0 1000 -\n")
    assert read_exit_record(record, since=90000) is None
    assert read_exit_record(record, since=900) == JobState("COMPLETED", "", "", 0, ("COMPLETED",), "exit record")
    record.write_text("143 1000 TERM\n")
    assert read_exit_record(record).state == "CANCELLED"  # type: ignore[union-attr]
    record.write_text("")
    assert read_exit_record(record) is None


def test_preempted_is_final_only_after_a_grace_period() -> None:
    watcher = WatcherWithAnswers({"sacct": sacct_line("5", "PREEMPTED"), "squeue": ""})
    watcher.register_job("5")
    watcher._registered_at["5"] -= 60
    assert not watcher.is_done("5", "force") and not watcher.state_of("5", "cache").ended
    watcher._requeued_at["5"] -= 60
    time.sleep(0.002)
    assert watcher.is_done("5", "force")


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "BOOT_FAIL"])
def test_requeued_job_has_not_ended(state: str) -> None:
    watcher = WatcherWithAnswers(
        {"sacct": sacct_line("5", state), "squeue": squeue_line("5", "PENDING", reason="BeginTime")}
    )
    watcher.register_job("5")
    watcher._registered_at["5"] -= 60
    job_state = watcher.state_of("5", "force")
    assert (job_state.state, job_state.source) == ("PENDING", "squeue") and [c[0] for c in watcher.queries] == [
        "sacct",
        "squeue",
    ]
    watcher.answers["squeue"] = None  # whether it was requeued is unknown
    for _ in range(2):
        time.sleep(0.002)
        watcher._requeued_at["5"] = watcher._requeued_at.get("5", time.monotonic()) - 60
        watcher._down_until.clear()
        assert not watcher.is_done("5", "force")
    watcher.answers["squeue"] = ""
    watcher._down_until.clear()
    time.sleep(0.002)
    assert watcher.is_done("5", "force") and watcher.get_state("5", "cache") == state


def test_job_unknown_to_the_controller_is_lost(tmp_path: Path) -> None:
    expected = JobIdentity("a", time.time() - 600, tmp_path / "5_exit")
    for answers, state in (({}, "UNKNOWN"), ({"sacct": ""}, "UNKNOWN"), ({"squeue": ""}, "FAILED")):
        watcher = WatcherWithAnswers(answers)
        watcher.set_identity("5", expected)
        job_state = watcher.state_of("5", "force")
        assert (job_state.state, job_state.ended) == (state, state == "FAILED"), answers
    assert "lost" in job_state.reason
    watcher = WatcherWithAnswers({"squeue": ""})
    watcher.set_identity("5", JobIdentity("a", time.time() - 5, tmp_path / "5_exit"))  # just submitted
    assert watcher.state_of("5", "force") == JobState(source="squeue")
    watcher.set_identity(
        "6", JobIdentity("a", time.time() - 600, Path("/nobody's/6_exit"))
    )  # may belong to another user
    assert watcher.state_of("6", "force").state == "UNKNOWN"


def test_exit_record_is_final_only_if_the_controller_answers(tmp_path: Path) -> None:
    record = tmp_path / "5_exit"
    record.write_text("1 1500 -\n")
    for answers, ended in (({"sacct": ""}, False), ({"sacct": "", "squeue": ""}, True)):
        watcher = WatcherWithAnswers(answers)
        watcher.set_identity("5", JobIdentity("a", 1000.0, record))
        state = watcher.state_of("5", "force")
        assert (state.state, state.source, state.ended) == ("FAILED", "exit record", ended)


def test_states_of_another_job_with_the_same_id_are_forgotten() -> None:
    watcher = WatcherWithAnswers({"squeue": squeue_line("5", "COMPLETED", name="mine", submit=5000)})
    watcher.set_identity("5", JobIdentity("mine", 5000.0))
    assert watcher.is_done("5", "force")
    watcher.set_identity("5", JobIdentity("mine", 5001.0))  # the same job, from another record
    assert watcher.get_state("5", "cache") == "COMPLETED"
    watcher.set_identity("5", JobIdentity("mine", 9000.0))
    assert not watcher.is_done("5", "cache") and watcher.get_state("5", "cache") == "UNKNOWN"
    watcher.answers["squeue"] = squeue_line("5", "RUNNING", name="mine", submit=9000)
    time.sleep(0.002)
    assert watcher.get_state("5", "force") == "RUNNING"


def test_no_busy_polling_without_answers() -> None:
    watcher = WatcherWithAnswers({})
    for _ in range(50):
        watcher.state_of("5")
    assert len(watcher.queries) <= 3  # one round over the sources, then a pause


MINE, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize("name", ["renamed", "", "☃" * 63, "x" * 255])
def test_token_identifies_a_job_whatever_its_name(name: str) -> None:
    expected = JobIdentity("train ☃", 5000.0, components=1, token=MINE)
    for line, command in ((squeue_line, "squeue"), (sacct_line, "sacct")):
        watcher = WatcherWithAnswers(
            {command: line("5", "RUNNING", name=name, submit=1, token=MINE)}
        )  # a requeue changes Submit
        watcher.set_identity("5", expected)
        assert watcher.state_of("5", "force").state == "RUNNING", command
        watcher = WatcherWithAnswers({command: line("5", "RUNNING", name="train ☃", submit=5000, token=OTHER)})
        watcher.set_identity("5", expected)
        assert watcher.state_of("5", "force").state == "UNKNOWN", command


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "Priority",
        "JobHeldAdmin",
        "JobHeldUser",
        "QOSMaxJobsPerUserLimit",
        "AssocGrpCpuLimit",
        "Dependency",
        "BeginTime",
        "launch failed requeued held",
    ],
)
def test_reason_is_queried_while_a_job_waits(reason: str) -> None:
    start = time.time() + 3600
    watcher = WatcherWithAnswers(
        {
            "sacct": sacct_line("5", "PENDING", submit=5000),
            "squeue": squeue_line("5", "PENDING", submit=5000, reason=reason, start=start),
        }
    )
    watcher.set_identity("5", JobIdentity("a", 5000.0))  # not young: the database knows it, but not why it waits
    for _ in range(2):
        state = watcher.state_of("5", "force")
        assert (state.state, state.reason, state.start) == ("PENDING", reason, int(start))
        assert state.why.startswith(reason if "held" in reason.lower() else f"{reason}, starts about ")
        assert ("starts" in state.why) == ("held" not in reason.lower())
        time.sleep(0.002)
    assert [command[0] for command in watcher.queries] == ["sacct", "squeue", "squeue"]  # from then on one query
    watcher.answers["squeue"] = squeue_line("5", "RUNNING", submit=5000, start=start)
    assert watcher.state_of("5", "force").why == ""


def test_one_query_per_poll_for_waiting_running_and_new_jobs() -> None:
    watcher = WatcherWithAnswers(
        {
            "sacct": "",
            "squeue": "".join(
                squeue_line(f"7_{i}", "RUNNING" if i < 8 else "PENDING", submit=5000) for i in range(300)
            ),
        }
    )
    for i in range(300):
        watcher.set_identity(f"7_{i}", JobIdentity("a", 5000.0))
        watcher.register_job(f"7_{i}")
    watcher.state_of("7_0", "force")
    num_queries = len(watcher.queries)
    watcher.set_identity("8", JobIdentity("a", time.time()))
    watcher.answers["squeue"] += squeue_line("8", "PENDING", submit=time.time(), reason="Priority")
    time.sleep(0.002)
    assert watcher.state_of("8", "force").reason == "Priority" and len(watcher.queries) == num_queries + 1
    assert watcher.state_of("7_299", "cache").state == "PENDING"
