"""States from Slurm's answers: joined over components, told apart over job-id reuse, right when a daemon is away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from slurm_text import sacct_line, squeue_line

from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.watcher import Expected, StateWatcher, read_record


class Watched(StateWatcher):
    """A watcher whose answers a test gives: {command: text, or None for a daemon that is away}."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self.answers, self.asked = answers, []

    def _query(self, command: list[str]) -> Any:  # type: ignore[override]
        from holmes_hpc.slurm.commands import Answer

        self.asked.append(command)
        text = self.answers.get(command[0])
        return Answer(1, "", "Socket timed out") if text is None else Answer(0, text, "")


def test_one_query_for_all_jobs_of_the_process() -> None:
    watcher = Watched({"sacct": "".join(sacct_line(str(i), "RUNNING") for i in range(200))})
    for i in range(200):
        watcher.register_job(str(i))
    for i in range(200):
        watcher._registered_at[str(i)] -= 60
    states = [watcher.get_state(str(i)) for i in range(200)]
    assert states == ["RUNNING"] * 200 and len(watcher.asked) == 1
    assert watcher.num_calls == 1


def test_finished_jobs_are_not_asked_for_again() -> None:
    watcher = Watched({"sacct": sacct_line("1", "COMPLETED") + sacct_line("2", "RUNNING")})
    for job in "12":
        watcher.register_job(job)
    watcher.state_of("1", "force")
    time.sleep(0.002)
    watcher.state_of("2", "force")
    assert watcher.asked[-1][-1] == "--jobs=2"


@pytest.mark.parametrize(
    "answers, source",
    [
        ({"sacct": sacct_line("5", "RUNNING")}, "sacct"),
        ({"squeue": squeue_line("5", "RUNNING")}, "squeue"),
        ({"scontrol": "JobId=5 JobName=a UserId=r JobState=RUNNING SubmitTime=1000"}, "scontrol"),
    ],
)
def test_the_next_source_answers_when_one_is_away(answers: dict[str, str], source: str) -> None:
    watcher = Watched(answers)
    nodes = "ib1" if source != "scontrol" else ""
    assert watcher.state_of("5", "force") == JobState(
        "RUNNING", "", nodes, None, ("RUNNING",), source, component_nodes=(nodes,)
    )


def test_all_away_keeps_what_was_known_and_reads_the_record(tmp_path: Path) -> None:
    answers: dict[str, Any] = {"sacct": sacct_line("5", "RUNNING")}
    watcher = Watched(answers)
    record = tmp_path / "5_exit"
    watcher.expect("5", Expected("a", 1000.0, record))
    assert watcher.state_of("5", "force").state == "RUNNING"
    answers.clear()
    time.sleep(0.002)
    assert watcher.state_of("5", "force").state == "RUNNING"
    record.write_text("1 1500 -\n")
    time.sleep(0.002)
    found = watcher.state_of("5", "force")
    assert (found.state, found.source, found.exit_code) == ("FAILED", "exit record", 1)


def test_the_database_does_not_take_back_what_the_controller_said() -> None:
    answers: dict[str, Any] = {"squeue": squeue_line("5", "RUNNING"), "sacct": sacct_line("5", "PENDING")}
    watcher = Watched(answers)
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


def test_a_clock_that_is_set_back_stops_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"sacct": sacct_line("5", "RUNNING")}
    watcher, now = Watched(answers), time.time()
    assert watcher.state_of("5", "force").state == "RUNNING"
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    answers["sacct"] = sacct_line("5", "COMPLETED")
    assert watcher.state_of("5").state == "COMPLETED"


def test_another_job_of_the_same_id_is_told_apart() -> None:
    mine, now = Expected("mine", 5000.0), 5000.0
    watcher = Watched({"sacct": sacct_line("5", "FAILED", submit=now - 86400, name="mine")})
    watcher.expect("5", mine)
    assert watcher.state_of("5", "force").state == "UNKNOWN"
    watcher = Watched({"sacct": sacct_line("5", "FAILED", submit=now + 9, name="other")})
    watcher.expect("5", mine)
    assert watcher.state_of("5", "force").state == "UNKNOWN"
    watcher = Watched({"sacct": sacct_line("5", "FAILED", submit=now - 1, name="mine")})
    watcher.expect("5", mine)
    assert watcher.state_of("5", "force").state == "FAILED"


def test_names_are_compared_as_the_database_keeps_them() -> None:
    watcher = Watched({"sacct": sacct_line("5", "RUNNING", submit=5000, name="n `it`s`")})
    watcher.expect("5", Expected('n "it\'s"', 5000.0))
    assert watcher.state_of("5", "force").state == "RUNNING"


def test_a_leader_whose_components_are_not_in_the_database_yet_has_not_ended() -> None:
    watcher = Watched({"sacct": sacct_line("5", "COMPLETED", submit=5000)})
    watcher.expect("5", Expected("a", 5000.0, components=2))
    assert not watcher.is_done("5", "force")
    watcher.answers["sacct"] = sacct_line("5+0", "COMPLETED", submit=5000) + sacct_line("5+1", "FAILED", submit=5000)
    time.sleep(0.002)
    assert watcher.is_done("5", "force") and watcher.get_state("5", "cache") == "FAILED"


def test_record_older_than_the_job_says_nothing(tmp_path: Path) -> None:
    record = tmp_path / "5_exit"
    record.write_text("0 1000 -\n")
    assert read_record(record, since=90000) is None
    assert read_record(record, since=900) == JobState("COMPLETED", "", "", 0, ("COMPLETED",), "exit record")
    record.write_text("143 1000 TERM\n")
    assert read_record(record).state == "CANCELLED"  # type: ignore[union-attr]
    record.write_text("")
    assert read_record(record) is None


def test_preempted_is_final_only_after_a_while() -> None:
    watcher = Watched({"sacct": sacct_line("5", "PREEMPTED"), "squeue": ""})
    watcher.register_job("5")
    watcher._registered_at["5"] -= 60
    assert not watcher.is_done("5", "force") and not watcher.state_of("5", "cache").ended
    watcher._requeued_at["5"] -= 60
    time.sleep(0.002)
    assert watcher.is_done("5", "force")


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "BOOT_FAIL"])
def test_what_the_queue_has_again_did_not_end(state: str) -> None:
    watcher = Watched({"sacct": sacct_line("5", state), "squeue": squeue_line("5", "PENDING", reason="BeginTime")})
    watcher.register_job("5")
    watcher._registered_at["5"] -= 60
    found = watcher.state_of("5", "force")
    assert (found.state, found.source) == ("PENDING", "squeue") and [c[0] for c in watcher.asked] == ["sacct", "squeue"]
    watcher.answers["squeue"] = None  # nobody can say whether it was requeued
    for _ in range(2):
        time.sleep(0.002)
        watcher._requeued_at["5"] = watcher._requeued_at.get("5", time.monotonic()) - 60
        watcher._down_until.clear()
        assert not watcher.is_done("5", "force")
    watcher.answers["squeue"] = ""
    watcher._down_until.clear()
    time.sleep(0.002)
    assert watcher.is_done("5", "force") and watcher.get_state("5", "cache") == state


def test_a_job_that_the_controller_does_not_know_is_lost(tmp_path: Path) -> None:
    expected = Expected("a", time.time() - 600, tmp_path / "5_exit")
    for answers, state in (({}, "UNKNOWN"), ({"sacct": ""}, "UNKNOWN"), ({"squeue": ""}, "FAILED")):
        watcher = Watched(answers)
        watcher.expect("5", expected)
        found = watcher.state_of("5", "force")
        assert (found.state, found.ended) == (state, state == "FAILED"), answers
    assert "lost" in found.reason
    watcher = Watched({"squeue": ""})
    watcher.expect("5", Expected("a", time.time() - 5, tmp_path / "5_exit"))  # just submitted
    assert watcher.state_of("5", "force") == JobState(source="squeue")
    watcher.expect("6", Expected("a", time.time() - 600, Path("/nobody's/6_exit")))  # another user's, maybe
    assert watcher.state_of("6", "force").state == "UNKNOWN"


def test_an_exit_record_may_be_of_a_job_that_was_requeued(tmp_path: Path) -> None:
    record = tmp_path / "5_exit"
    record.write_text("1 1500 -\n")
    for answers, ended in (({"sacct": ""}, False), ({"sacct": "", "squeue": ""}, True)):
        watcher = Watched(answers)
        watcher.expect("5", Expected("a", 1000.0, record))
        found = watcher.state_of("5", "force")
        assert (found.state, found.source, found.ended) == ("FAILED", "exit record", ended)


def test_what_was_learnt_of_another_job_of_the_same_id_is_dropped() -> None:
    watcher = Watched({"squeue": squeue_line("5", "COMPLETED", name="mine", submit=5000)})
    watcher.expect("5", Expected("mine", 5000.0))
    assert watcher.is_done("5", "force")
    watcher.expect("5", Expected("mine", 5001.0))  # as another record has it
    assert watcher.get_state("5", "cache") == "COMPLETED"
    watcher.expect("5", Expected("mine", 9000.0))
    assert not watcher.is_done("5", "cache") and watcher.get_state("5", "cache") == "UNKNOWN"
    watcher.answers["squeue"] = squeue_line("5", "RUNNING", name="mine", submit=9000)
    time.sleep(0.002)
    assert watcher.get_state("5", "force") == "RUNNING"


def test_no_busy_polling_while_nobody_answers() -> None:
    watcher = Watched({})
    for _ in range(50):
        watcher.state_of("5")
    assert len(watcher.asked) <= 3  # one round over the sources, then a pause


MINE, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize("name", ["renamed", "", "☃" * 63, "x" * 255])
def test_a_job_is_known_by_its_script_whatever_its_name_is(name: str) -> None:
    expected = Expected("train ☃", 5000.0, components=1, token=MINE)
    for line, command in ((squeue_line, "squeue"), (sacct_line, "sacct")):
        watcher = Watched({command: line("5", "RUNNING", name=name, submit=1, token=MINE)})  # a requeue changes Submit
        watcher.expect("5", expected)
        assert watcher.state_of("5", "force").state == "RUNNING", command
        watcher = Watched({command: line("5", "RUNNING", name="train ☃", submit=5000, token=OTHER)})
        watcher.expect("5", expected)
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
def test_why_a_job_waits_is_asked_as_long_as_it_waits(reason: str) -> None:
    start = time.time() + 3600
    watcher = Watched(
        {
            "sacct": sacct_line("5", "PENDING", submit=5000),
            "squeue": squeue_line("5", "PENDING", submit=5000, reason=reason, start=start),
        }
    )
    watcher.expect("5", Expected("a", 5000.0))  # not young: the database knows it, but not why it waits
    for _ in range(2):
        found = watcher.state_of("5", "force")
        assert (found.state, found.reason, found.start) == ("PENDING", reason, int(start))
        assert found.why.startswith(reason if "held" in reason.lower() else f"{reason}, starts about ")
        assert ("starts" in found.why) == ("held" not in reason.lower())
        time.sleep(0.002)
    assert [words[0] for words in watcher.asked] == ["sacct", "squeue", "squeue"]  # from then on one query
    watcher.answers["squeue"] = squeue_line("5", "RUNNING", submit=5000, start=start)
    assert watcher.state_of("5", "force").why == ""


def test_one_query_a_poll_for_jobs_that_wait_run_and_are_new() -> None:
    watcher = Watched(
        {
            "sacct": "",
            "squeue": "".join(
                squeue_line(f"7_{i}", "RUNNING" if i < 8 else "PENDING", submit=5000) for i in range(300)
            ),
        }
    )
    for i in range(300):
        watcher.expect(f"7_{i}", Expected("a", 5000.0))
        watcher.register_job(f"7_{i}")
    watcher.state_of("7_0", "force")
    asked = len(watcher.asked)
    watcher.expect("8", Expected("a", time.time()))
    watcher.answers["squeue"] += squeue_line("8", "PENDING", submit=time.time(), reason="Priority")
    time.sleep(0.002)
    assert watcher.state_of("8", "force").reason == "Priority" and len(watcher.asked) == asked + 1
    assert watcher.state_of("7_299", "cache").state == "PENDING"
