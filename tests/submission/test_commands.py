"""The commands submit, logs, cancel, plan --earliest and run --earliest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
from command_line import run_command
from slurm_text import node_line, partition_line

from holmes_hpc.cli import runs, submission_steps
from holmes_hpc.cli.submission_steps import note_requeues, plan_run
from holmes_hpc.config.composition import load
from holmes_hpc.errors import ConfigError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_queries import SEPARATOR
from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.lifecycle import progress
from holmes_hpc.submission.sweeps.sweep_table import SweepRow, select_rows

pytestmark = pytest.mark.integration

EMULATED = ("model=gpt_tiny", "train.pace_layer_ms=40", "slurm.timeout_min=6000")
Holmes = Callable[..., tuple[int, str, str]]


@pytest.fixture
def holmes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, hydra_restore_singletons: object
) -> Holmes:
    """Return a function that runs `holmes ARGS` and returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("HOLMES_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    return partial(run_command, monkeypatch, capfd)


@pytest.mark.parametrize("args", [(), ("train.steps=3",)])
def test_submit_without_a_plan_gives_a_hint(holmes: Holmes, args: tuple[str, ...]) -> None:
    code, out, err = holmes("submit", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no plan" in err and "`holmes plan" in err and "`holmes run`" in err


@pytest.mark.parametrize("args, word", [(("launcher=local",), "launcher=local"), (("plan_file=x.yaml",), "one plan")])
def test_earliest_is_refused_without_a_choice(holmes: Holmes, args: tuple[str, ...], word: str) -> None:
    for command in ("plan", "run"):
        code, out, err = holmes(command, "--earliest", *args)
        assert (code, out, err.count("\n")) == (2, "", 1) and word in err


def test_logs_of_many_ranks_begin_with_the_failed_rank(holmes: Holmes, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "r")
    for rank in range(70):
        run.log_path(rank).write_text(f"line of {rank}\n")
    run.write_result({"state": "failed", "failed_rank": 67})
    code, out, err = holmes("logs", "r")
    assert code == 0 and out.splitlines()[:3] == ["== rank-67.txt", "line of 67", "== rank-0.txt"]
    assert out.count("==") == 64 and "6 more logs are not shown; `holmes logs r --rank N` shows one" in err


def test_logs_and_cancel_in_json(holmes: Holmes, tmp_path: Path, fake_slurm: Any) -> None:
    run = RunDirectory.create(
        tmp_path / "runs" / "r", config={"train": {"steps": 9}}, slurm={"job_id": 7, "submitted": time.time() - 100}
    )
    run.log_path(1).write_text("a\nb\nc\n")
    code, out, _ = holmes("logs", "r", "-n", "2", "--json")
    assert code == 0 and json.loads(out) == {"run": str(run.path), "logs": {"rank-1.txt": ["b", "c"]}}
    assert holmes("logs", "r", "--follow", "--json")[0] == 2
    row = SEPARATOR.join(["7", "RUNNING", str(int(time.time())), "None", "ib1", "x"])
    script = run.path / "submission" / ".submission_file_1.sh"
    fake_slurm.answer("squeue", f"case $* in *'=%i %o') echo '7 {script}';; *) echo '{row}';; esac")
    fake_slurm.answer("scancel", "exit 0")
    code, out, _ = holmes("status", "r", "--json")
    assert [s["state"] for s in json.loads(out)] == ["running"]
    code, out, _ = holmes("cancel", "r", "--json")
    assert code == 0 and json.loads(out) == {"run": str(run.path), "was": "running", "cancelled": True}
    assert fake_slurm.calls("scancel") == [["7"]]


def test_status_of_a_failed_run_ends_with_a_hint(holmes: Holmes, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "r", config={"train": {"steps": 9}}, slurm={"job_id": 7})
    run.write_result({"state": "failed", "error": "rank 1 died", "failed_rank": 1, "failed_node": "ib1"})
    assert holmes("status", "r")[1].endswith("r: rank 1 on ib1: rank 1 died\n")
    run.log_path(0).write_text("2026-01-01 00:00:00.000 warning: node ib1: slow; check it\n")
    assert f"r: 1 warning in {run.log_path(0)}\n" in holmes("status", "r")[2]
    checkpoint = run.checkpoints / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_bytes(b"ab")
    (checkpoint / "holmes.json").write_text(json.dumps({"files": {".metadata": [2, 0]}}))
    assert holmes("status", "r")[1].endswith("rank 1 died\ncontinue after step 4 with `holmes resume r`\n")
    run.append_metrics({"step": 6, "attempt": 1})
    assert holmes("status", "r")[1].endswith("`holmes resume r` (steps 5 to 6 were not saved)\n")


def test_status_of_an_elastic_run_shows_its_goodput(holmes: Holmes, tmp_path: Path) -> None:
    config = {"train": {"steps": 9}, "elastic": {"enabled": True}}
    run = RunDirectory.create(tmp_path / "runs" / "r", config=config)
    created = datetime.fromisoformat(run.read_run()["created"]).timestamp()
    for step, attempt in ((1, 1), (2, 1), (2, 2)):
        run.append_metrics({"step": step, "attempt": attempt, "step_time_s": 10.0, "time": created + 40})
    assert "r: 50% of the time since its creation is in steps" in holmes("status", "r")[2]


def test_a_long_table_shows_the_most_important_rows() -> None:
    states = ["completed"] * 6 + ["pending"] * 2 + ["running", "failed", "completing"]
    rows = [SweepRow(i, (), str(i), state, "", None, None, None, None, "") for i, state in enumerate(states)]
    assert select_rows(rows, 11) == rows
    assert [r.state for r in select_rows(rows, 5)] == ["failed", "running", "completing", "pending", "pending"]


@pytest.mark.parametrize("status, code", [(137, 1), (0, 0)])
def test_run_json_has_one_exit_code_that_of_the_command(
    holmes: Holmes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: int
) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "one", plan_text="", config={}, overrides=[], plan_id="")
    run.write_result({"state": "failed" if status else "completed", "exit_code": status})
    plan, job = SimpleNamespace(id="0", strategy_label="", components=()), SimpleNamespace(id="7")
    monkeypatch.setattr(runs, "plan_run", lambda *_, **__: (plan, None))
    monkeypatch.setattr(runs, "create_and_submit", lambda *_: (run, job))
    monkeypatch.setattr(progress, "report_progress", lambda *_, **__: code)
    found, out, _ = holmes("run", "--json")
    printed = json.loads(out)
    assert found == code == printed["exit_code"] and out.count('"exit_code"') == 1
    assert printed["result"]["job_exit_code"] == status


@pytest.fixture
def gpu_site(fake_slurm: Any) -> Any:
    """Return a Slurm with two kinds of GPU, whose partition allows four hours."""
    texts = {
        "node": "\n".join(
            node_line(f"{kind}-{i}", f"{features},eth_25g,fabric_{kind}", "gpu", gres=f"gpu:{kind}:4(S:0-1)")
            for kind, features in (("a100", "nic_ib,nic_200g"), ("h100", "nic_roce,nic_400g"))
            for i in (1, 2)
        ),
        "partition": partition_line("gpu", "a100-[1-2],h100-[1-2]", max_time="04:00:00"),
        "config": "ClusterName = c\nSchedulerType = sched/backfill",
    }
    answers = "\n".join(f"{name}) cat <<'E'\n{text}\nE\n;;" for name, text in texts.items())
    fake_slurm.answer("scontrol", f"case $2 in\n{answers}\nesac")
    return fake_slurm


def test_a_job_requests_gpu_types_and_notes_its_time_limits(holmes: Holmes, gpu_site: Any) -> None:
    code, _, err = holmes("plan", "model=gpt_tiny", "plan.pp=2", "slurm.timeout_min=300", "-o", "plan.yaml")
    limit = "300 min exceeds the partition's time limit of 240 min; request less time, or name a QOS"
    assert code == 0 and f"slurm.timeout_min: pool a100: {limit}" in err and f"pool h100: {limit}" in err
    long = ("train.steps=1000000000", "slurm.timeout_min=300", "data=synthetic")
    code, out, err = holmes("submit", "plan.yaml", *long, "--dry-run")
    assert code == 0 and limit in err and "slurm.timeout_min is 300, and 1,000,000,000 steps take" in err
    assert {"#SBATCH --gpus-per-node=a100:4", "#SBATCH --gpus-per-node=h100:4"} <= set(out.splitlines())
    code, out, err = holmes("submit", "plan.yaml", "train.steps=3", "slurm.timeout_min=240", "--dry-run")
    assert code == 0 and "slurm.timeout_min" not in err


SITE_FILE = """
name: c
ethernet_gbps: 25
fabrics: [{name: ib, nic: ib, rdma_gbps: 200, partition: gpu, nodes: 2, gpus_per_node: 4}]
pools:
  - {name: new, fabric: ib, gpu: {name: h100}, gres_type: h100}
  - {name: old, fabric: ib, gpu: {name: a100-80gb}, gres_type: a100}
"""
TESTED = """
for a in "$@"; do case "$a" in --test-only) test=1;; --gpus-per-node=b*) bad=1;; *.sh) file=$a;; esac; done
[ -n "$test" ] || { echo 7; exit; }
[ -z "$bad" ] || { echo "allocation failure: Requested node configuration is not available" >&2; exit 1; }
when=2020-01-01T00:00:00
[ -n "$file" ] && grep -q hetjob "$file" && when=2099-01-01T00:00:00
echo "sbatch: Job 9 to start at $when using 4 processors on nodes n1 in partition p" >&2
"""


def test_submit_prints_the_expected_start_unless_it_is_not_to_test(holmes: Holmes, gpu_site: Any) -> None:
    gpu_site.answer("sbatch", TESTED)
    assert holmes("plan", "model=gpt_tiny", "plan.pp=2", "-o", "plan.yaml")[0] == 0
    run = ("submit", "plan.yaml", "data=synthetic", "train.steps=3")
    code, out, err = holmes(*run)
    assert code == 0 and out.startswith("job 7: ") and "expected start: 2099-01-01 00:00:00, in " in err
    preflight.clear_cache()
    code, _, err = holmes(*run, "--no-test", "slurm.timeout_min=300", "name=untested")
    tests = [call for call in gpu_site.calls("sbatch") if "--test-only" in call]
    assert code == 0 and "expected start" not in err and [call[-1] == "--wrap=:" for call in tests] == [1, 1, 0, 1, 1]
    types = {word for call in tests[3:] for word in call if word.startswith("--gpus-per-node")}
    assert types == {"--gpus-per-node=a100:4", "--gpus-per-node=h100:4"}
    code, _, err = holmes(*run, "slurm.timeout_min=300", "name=refused")
    assert code == 2 and "300 min exceeds" in err
    code, _, err = holmes(*run, "--no-test", "name=bad", "slurm.pools={h100: {additional: {gpus_per_node: b200:4}}}")
    assert code == 2 and "nic_roce&fabric_h100" in err and "not available" in err
    one = [*run[:1], "one.yaml", *run[2:]]
    assert holmes("plan", "model=gpt_tiny", "plan.nodes={a100: 1}", "-o", "one.yaml")[0] == 0
    assert "expected start: now" in holmes(*one, "name=one")[2]
    code, out, _ = holmes(*run, "name=json", "--json")
    assert code == 0 and json.loads(out)["expected_start"].startswith("2099-01-01T00:00:00")
    assert json.loads(holmes(*run, "name=none", "--no-test", "--json")[1])["expected_start"] is None


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (3, "components 0 and 1: they need 6 nodes together, but only 4 satisfy their conditions"),
        (8, "component 0 (8 nodes of gpu): 4 nodes of this Slurm satisfy its conditions"),
    ],
)
def test_a_dry_run_notes_that_slurm_has_too_few_nodes(holmes: Holmes, gpu_site: Any, nodes: int, text: str) -> None:
    pool = f"nic: ib, rdma_gbps: 200, partition: gpu, nodes: {nodes}, gpus_per_node: 4, gpu: {{name: h100}}"
    Path("site.yaml").write_text(f"name: c\nethernet_gbps: 25\nfabrics: [{{name: a, {pool}}}, {{name: b, {pool}}}]\n")
    layout = ("model=gpt_tiny", "batch.global_size=256", f"plan.nodes={{a: {nodes}, b: {nodes}}}", "plan.pp=2")
    assert holmes("plan", "--site", "site.yaml", *layout, "-o", "plan.yaml")[0] == 0
    preflight.clear_cache()
    words = ("submit", "plan.yaml", "--site", "site.yaml", "data=synthetic", "train.steps=3", "--dry-run")
    code, out, err = holmes(*words)
    assert code == 0 and out.startswith("#!") and text in err


def test_earliest_asks_slurm_for_the_nodes_of_a_site_file(holmes: Holmes, gpu_site: Any, monkeypatch: Any) -> None:
    gpu_site.answer("sbatch", TESTED)
    Path("site.yaml").write_text(SITE_FILE)
    code, out, err = holmes("plan", "model=gpt_tiny", "--earliest", "--site", "site.yaml", "--json")
    first = json.loads(out)["earliest"][0]
    assert code == 0 and set(first["nodes"]) <= {"new", "old"} and first["start"]
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = holmes("run", "model=gpt_tiny", "--earliest", "--site", "site.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1) and "no sbatch on this machine" in err


def test_steps_of_a_checkpoint_need_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    plan, config = plans.plan("ib-a", step_time_s=1.0), load(["train.steps=4000"])
    note_requeues(plan, config, done_steps=1000)
    note_requeues(plan, replace(config, launcher=replace(config.launcher, kind="local")))
    assert not capsys.readouterr().err
    note_requeues(plan, config)
    assert "requeued about 1 time" in capsys.readouterr().err


def test_pools_of_their_own_need_a_second_pool_and_time_to_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model=gpt_tiny", "elastic.enabled=true", "elastic.members=true")
    monkeypatch.setattr(submission_steps, "load_site", lambda _: None)
    monkeypatch.setattr(submission_steps, "make_plan", lambda *_: plans.plan("ib-a"))
    plan_run([*words, "slurm.timeout_min=1"])
    assert "elastic.members has no effect: the plan has one pool" in capsys.readouterr().err
    monkeypatch.setattr(submission_steps, "make_plan", lambda *_: plans.plan("ib-a", "roce-a"))
    plan_run([*words, "slurm.timeout_min=2"])
    with pytest.raises(ConfigError, match=r"slurm\.timeout_min: 1 is too short for a job to start"):
        plan_run([*words, "slurm.timeout_min=1"])
    with pytest.raises(ConfigError, match=r"elastic\.min_nodes: 9 nodes are more than the 4 of the plan, so the run"):
        plan_run([*words, "elastic.min_nodes=9"])
    with pytest.raises(ConfigError, match=r"elastic\.min_fabrics: 3 pools are more than the 2 of the plan, so the run"):
        plan_run([*words, "elastic.members=true", "elastic.min_fabrics=3"])


@pytest.mark.slurm
@pytest.mark.thorough  # see also test_earliest_asks_slurm_for_the_nodes_of_a_site_file
@pytest.mark.usefixtures("busy_roce")
def test_a_long_training_waits_for_the_better_nodes(holmes: Holmes, tmp_path: Path) -> None:
    """For a long training, waiting for the better nodes pays."""
    code, out, err = holmes("plan", *EMULATED, "--earliest", "--steps", "100000", "-o", str(tmp_path / "plan.yaml"))
    assert code == 0, err
    assert {"nodes", "layout", "start", "duration", "end"} <= set(out.splitlines()[1].split()), out
    assert "roce-a: 4" in out.splitlines()[2] and max(map(len, out.splitlines())) <= 100, out
    assert "slurm.timeout_min=" in err


@pytest.mark.slurm
@pytest.mark.thorough
@pytest.mark.usefixtures("busy_roce")
def test_a_plan_that_starts_now_is_first_for_a_short_training(holmes: Holmes) -> None:
    code, out, err = holmes("plan", *EMULATED, "--earliest", "--steps", "20", "--json")
    assert code == 0, err
    short = json.loads(out)
    first, *others = short["earliest"]
    assert {c["fabric"] for c in short["components"]} == set(first["nodes"]) and "roce-a" not in first["nodes"]
    waits = [c for c in others if "roce-a" in c["nodes"]]
    assert waits and all(c["end"] >= first["end"] and c["start"] > first["start"] for c in waits)
    assert first["timeout_min"] < 10 and first["duration_s"] < 120


@pytest.mark.slurm
@pytest.mark.usefixtures("busy_roce")
@pytest.mark.thorough  # see also test_earliest_asks_slurm_for_the_nodes_of_a_site_file
def test_run_chooses_the_plan_that_ends_first(holmes: Holmes) -> None:
    code, out, err = holmes("run", "--earliest", "--steps", "2", "model=gpt_tiny", "--json")
    assert code == 0, err
    found = json.loads(out)
    run = RunDirectory(found["run"])
    assert found["result"]["state"] == "completed" and found["result"]["final"]["step"] == 2
    assert run.config["slurm"]["timeout_min"] < 10 and run.config["train"]["steps"] == 2
    assert "roce" not in run.plan_path.read_text().partition("components:")[2].partition("stages:")[0]
    assert "duration" in err and "slurm.timeout_min=" in err
