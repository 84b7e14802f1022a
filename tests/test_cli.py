"""The `holmes` command: exit codes, one line for bad input, JSON that parses."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import holmes, refused  # noqa: F401 (a fixture)
from published_runs import predicted_s, read

from holmes_hpc import console
from holmes_hpc.cli import man
from holmes_hpc.cli.planning import _show_pool
from holmes_hpc.cli.predict import SOFTWARE_FLAGS
from holmes_hpc.cli.submission_steps import plan_run
from holmes_hpc.config.composition import load
from holmes_hpc.config.hugging_face import config_of
from holmes_hpc.config.models import named
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.cost.calibration import MeasuredPool
from holmes_hpc.planning.cost.network_figures import Link
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.locks import TRAINING_LOCK, LockOwner, hold_lock
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle import requirements

pytestmark = pytest.mark.integration

TWO = """
name: two-clusters
ethernet_gbps: 25
gpu: {name: a100-80gb, peak_tflops: 312, memory_gib: 80, intra_node_gbps: 2400}
fabrics:
  - {name: ib-a, nic: ib, rdma_gbps: 200, partition: gpu-ib, nodes: 4, gpus_per_node: 8}
  - {name: roce-a, nic: roce, rdma_gbps: 200, partition: gpu-roce, nodes: 4, gpus_per_node: 8}
"""
FIXED = ("model=gpt_3_6b", "batch=paper_3_6b", "plan.tp=1", "plan.pp=2")  # planned in a tenth of a full search's time


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(TWO)
    return path


def test_plan_for_a_site_file_is_written_and_read_back(holmes, site, tmp_path):
    target = tmp_path / "plan.yaml"
    code, out, _ = holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", "--site", str(site), "-o", str(target))
    assert code == 0
    plan = Plan.read(target)
    assert plan.model.name == "gpt_3_6b" and plan.site.name == "two-clusters"
    assert max(map(len, out.splitlines())) <= 100


def test_a_doubtful_site_is_reported_before_its_plan(holmes, tmp_path):
    target, path = tmp_path / "plan.yaml", tmp_path / "site.yaml"
    path.write_text(TWO.replace("nic: ib, rdma_gbps: 200", "nic: ib, rdma_gbps: 25"))
    code, _, err = holmes("plan", *FIXED, "--site", str(path), "-o", str(target))
    assert code == 0 and "rdma_gbps of ib-a is 25, which no InfiniBand has" in " ".join(err.split())


def test_deep_pipelines_show_their_networks(holmes, site):
    fixed = ("plan.strategy=one-fabric", "plan.pp=16", "plan.tp=1", "plan.dp=2")
    code, out, _ = holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", *fixed, "--site", str(site), "--explain")
    text = " ".join(out.replace("|", " ").split())  # however wide the terminal is
    assert code == 0 and "stages 0 to 15: 1, 2, 2" in text and "data parallel by local" in text


def test_json_of_a_plan_is_one_document(holmes, site):
    code, out, _ = holmes("plan", *FIXED, "--site", str(site), "--json")
    assert code == 0
    found = json.loads(out)
    for key in (
        "version",
        "strategy",
        "model",
        "batch",
        "parallel",
        "recompute",
        "schedule",
        "bucket_bytes",
        "edge_dtype",
        "components",
        "stages",
        "transports",
        "predicted",
        "assumptions",
        "alternatives",
    ):
        assert key in found, key
    for key in (
        "step_time_s",
        "samples_per_s",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "memory_bytes_per_gpu",
        "nic_bytes_per_step",
        "breakdown",
    ):
        assert key in found["predicted"], key


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.tp=3"], ["TP 3"]),
        (["plan.pp=64", "plan.dp=1", "plan.tp=1"], ["30"]),
        (["plan.nodes={ib-a: 40}"], ["ib-a", "4"]),
        (["plan.nodes={ib-z: 2}"], ["ib-z"]),
        (["batch.global_size=7"], ["7"]),
        (["model.hidden=3071"], ["3071", "heads"]),
        (["plan.strategy=fastest"], ["fastest"]),
        (["plan.stratgy=auto"], ["plan.stratgy", "plan.strategy"]),
        (["model=gpt_4"], ["gpt_4", "gpt_39b"]),
        (["train.steps=0"], ["train.steps"]),
        (["train.lr=abc"], ["train.lr", "abc"]),
        (["train.overlap_grad_reduce=maybe"], ["train.overlap_grad_reduce", "maybe"]),
        (["plan.edge_connections=0"], ["edge_connections"]),
        (["model.heads=1024", "model.kv_heads=1024"], ["3072", "1024", "odd"]),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(holmes, site, overrides, words):
    refused(holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", *overrides, "--site", str(site)), *words)


def test_bad_site_files(holmes, tmp_path):
    for text, words in (
        (TWO.replace("rdma_gbps: 200", "rdma_gbps: -1", 1), ["rdma_gbps", "-1"]),
        (TWO.replace("nodes: 4", "nodes: 0", 1), ["nodes"]),
        (TWO.replace("partition:", "partitoin:", 1), ["partitoin", "partition"]),
        ("{", ["YAML"]),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        refused(holmes("plan", "--site", str(path)), "bad.yaml", *words)
    refused(holmes("plan", "--site", str(tmp_path / "none.yaml")), "none.yaml")


def test_learning_without_runs_is_refused(holmes, site, tmp_path):
    refused(holmes("plan", "--learn", str(tmp_path), "--site", str(site)), "no run to learn from", "--learn")
    plan = tmp_path / "plan.yaml"
    assert holmes("plan", "--site", str(site), *FIXED, "-o", str(plan))[0] == 0
    refused(
        holmes("plan", f"plan_file={plan}", "--learn", str(tmp_path)), "it cannot change the finished plan of plan_file"
    )


def test_a_bad_calibration_file_is_named(holmes, site, tmp_path):
    path = tmp_path / "bad.cal.yaml"
    path.write_text("device: cpu\npats: []\n")
    refused(holmes("plan", f"calibration={path}", "--site", str(site)), "bad.cal.yaml", "pats")


def test_status_without_runs(holmes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLMES_RUNS", "elsewhere")
    code, out, err = holmes("status")
    assert code == 0 and not out and f"no runs in {tmp_path / 'elsewhere'}" in err
    assert holmes("status", "--json")[1].strip() == "[]"


def test_a_directory_of_runs_that_is_none_is_named(holmes, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    refused(holmes("logs", str(tmp_path / "empty")), str(tmp_path / "empty"), "it has no run.yaml")
    monkeypatch.setenv("HOLMES_RUNS", "/dev/null")
    refused(holmes("status"), "/dev/null", "Not a directory", "HOLMES_RUNS")


def local(*more: str) -> list[str]:
    return ["launcher=local", "plan.pp=2", "plan.dp=2", *more]


def test_data_are_checked_before_planning(holmes, tmp_path):
    """Wrong vocabulary, too short, without group, or missing: one line each, and no run directory.
    The check does not import Megatron, which takes seconds."""
    prefix = tmp_path / "text"
    (tmp_path / "a.txt").write_text("all work and no play " * 2000)
    assert holmes("data", "prepare", str(tmp_path / "a.txt"), "-o", str(prefix))[0] == 0
    data = ("data=indexed", f"data.prefix={prefix}")
    refused(holmes("run", *local(*data, "model.vocab=100")), "text.bin", "token id", "vocabulary of 100")
    refused(holmes("run", *local(*data, "batch.global_size=1024")), "training part has", "a step takes 1024")
    refused(holmes("run", *local(f"data.prefix={prefix}")), "data.kind is not given", "add data=indexed")
    refused(holmes("run", *local("checkpoint=/nope/step-3")), "checkpoint: '/nope/step-3' does not exist")
    assert not list((tmp_path / "runs").glob("*"))
    code = "import sys; from holmes_hpc.training.data import prefix; sys.exit('megatron' in str(sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plan_does_not_import_submitit():
    code = "import sys; import holmes_hpc.cli.planning; sys.exit('submitit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_data_are_not_tokenized_without_torch(holmes, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("all work and no play")
    monkeypatch.setattr("holmes_hpc.extras.find_spec", lambda name: None if name == "torch" else name)
    done = holmes("data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d"))
    refused(done, "the package torch is not installed", "pip install 'holmes-hpc[train]' (without a GPU: ")
    assert not list(tmp_path.glob("d*"))


def test_data_are_not_overwritten_without_force(holmes, tmp_path):
    (tmp_path / "texts" / "below").mkdir(parents=True)
    for name in ("texts/a.txt", "texts/below/b.txt", "texts/.hidden", "c.txt"):
        (tmp_path / name).write_text(f"the text of {name}")
    prefix = str(tmp_path / "d")
    code, out, _ = holmes("data", "prepare", str(tmp_path / "texts"), "-o", prefix)
    assert code == 0 and out.startswith("2 documents of 2 files")
    refused(holmes("data", "prepare", str(tmp_path / "c.txt"), "-o", prefix), "d.idx", "2 documents", "--force")
    assert holmes("data", "prepare", str(tmp_path / "texts"), "-o", prefix)[0] == 0  # the same again: nothing to do
    assert holmes("data", "prepare", str(tmp_path / "c.txt"), "-o", prefix, "--force")[1].startswith("1 document of")
    (tmp_path / "empty").mkdir()
    refused(holmes("data", "prepare", str(tmp_path / "empty"), "-o", prefix), "no file in this folder")


def test_a_run_without_a_step_is_replaced_and_rm_asks_first(holmes, tmp_path, capsys):
    from holmes_hpc.submission.lifecycle.create import remove_unused_run

    target = tmp_path / "plan.yaml"
    assert holmes("plan", *local(), "-o", str(target))[0] == 0
    run = RunDirectory.create(tmp_path / "runs" / "mine", plan_text=target.read_text())
    remove_unused_run(run)
    assert not run.exists() and not any(run.path.iterdir())  # the directory stays, for the lock
    run = RunDirectory.create(run.path, plan_text=target.read_text())
    (run.path / "notes.txt").write_text("somebody's")
    remove_unused_run(run)
    assert run.exists()
    (run.path / "notes.txt").unlink()
    run.append_metrics({"step": 1, "loss": 1.0})
    remove_unused_run(run)
    assert run.exists()
    capsys.readouterr()
    refused(holmes("rm", "mine"), "--yes")
    code, out, _ = holmes("rm", "mine", "--yes")
    assert code == 0 and "removed: " in out and not run.path.exists()
    refused(holmes("rm", "mine", "--yes"), "no such run")
    elsewhere = {"pid": 1, "host": "another", "started": 1.0}
    run = RunDirectory.create(run.path, plan_text=target.read_text(), local=elsewhere)
    run.start_attempt()
    refused(holmes("rm", "mine", "--yes"), "whether the run has ended is not known")
    (tmp_path / "large" / "mine" / "step-00000001").mkdir(parents=True)
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path / "large" / "mine")
    for rank in range(Plan.read(target).world_size):
        run.write_exit(rank, "completed")
    with hold_lock(run.path / TRAINING_LOCK, LockOwner.current("a test")):
        refused(holmes("rm", "mine", "--yes"), "a process still trains into this directory; wait until it ends")
    assert holmes("rm", "mine", "--yes")[0] == 0
    assert not run.path.exists() and list((tmp_path / "large").iterdir()) == []
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").touch()
    refused(holmes("rm", str(tmp_path / "sweep"), "--yes"), "name its runs")


def test_tables_break_no_words_at_any_width(holmes, monkeypatch):
    for width in (40, 60, 80, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, _ = holmes("models")
        assert code == 0 and max(map(len, out.splitlines())) <= width, width
        words = set(out.split())
        assert {"gpt3_175b", "12288", "128,256", "1,536", "vocabulary"} <= words, width
    assert out.splitlines()[1].split() == ["gpt_tiny", "8", "256", "8", "8", "640", "257", "16", "64"]


def test_an_ascii_terminal_gets_ascii(tmp_path):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "holmes_hpc", "predict", "größe…–"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "gr??e...-" in done.stderr


def test_a_plan_is_printed_as_wide_as_the_terminal(holmes, site, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = holmes("plan", *FIXED, "--site", str(site), "--explain")
    assert code == 0 and max(map(len, out.splitlines())) <= 60 and "\n|     gpu-ib\n" in out and " 0%" not in out
    monkeypatch.setenv("COLUMNS", "160")
    out = holmes("plan", *FIXED, "--site", str(site), "--explain")[1]
    assert 100 < max(map(len, out.splitlines())) <= 160


def test_the_manual_page_is_up_to_date():
    assert man.PAGE.read_text(encoding="utf-8") == man.page(), "run python -m holmes_hpc.cli.man"


def test_version_help_and_batches(holmes):
    assert holmes("-V")[1].startswith("holmes_hpc ") and "Usage" in holmes("plan", "-h")[1]
    assert json.loads(holmes("batches", "--json")[1])["llama2_7b"]["tokens"] == 4 << 20


def test_missing_and_truncated_data_leave_nothing(holmes, tmp_path):
    prefix = tmp_path / "text"
    refused(holmes("run", *local("data=indexed", f"data.prefix={prefix}")), "text.idx")
    (tmp_path / "a.txt").write_text("all work and no play " * 2000)
    assert holmes("data", "prepare", str(tmp_path / "a.txt"), "-o", str(prefix))[0] == 0
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(1000)
    refused(holmes("run", *local("data=indexed", f"data.prefix={prefix}")), "text.bin", "truncated")
    assert not list((tmp_path / "runs").glob("*"))


def test_a_plan_with_data_parallel_over_two_fabrics_is_refused(holmes, site, tmp_path):
    target = tmp_path / "plan.yaml"
    holmes(
        "plan",
        "model=gpt_3_6b",
        "batch=paper_3_6b",
        "plan.strategy=pipeline",
        "plan.pp=2",
        "plan.tp=1",
        "--site",
        str(site),
        "-o",
        str(target),
    )
    data = yaml.safe_load(target.read_text())
    data["parallel"]["order"] = "tp-cp-ep-pp-dp"
    del data["derived"]
    target.write_text(yaml.safe_dump(data))
    refused(holmes("submit", str(target), "--dry-run"), "stage 0 has ranks in", "ib-a", "roce-a")


def test_a_broken_plan_file(holmes, tmp_path):
    path = tmp_path / "plan.yaml"
    refused(holmes("submit", str(path)), "plan.yaml")
    path.write_text("version: 99\nmodel: 3\n")
    refused(holmes("submit", str(path)), "plan.yaml")


def test_unknown_runs_are_named(holmes):
    for command in ("status", "logs", "cancel", "report"):
        refused(holmes(command, "no-such-run"), "no-such-run")


def test_unknown_commands_and_options(holmes):
    refused(holmes("pln"), "pln")
    refused(holmes("plan", "--sight", "x"), "--sight")
    refused(holmes("plan", "--partition", "exact"), "--partition", "plan.partition=…")
    refused(holmes("plan", "--lr", "1"), "--lr", "train.lr=…")
    refused(holmes("plan", "llama2_7b"), "'model=llama2_7b'")
    refused(holmes("export", "a-run"), "--safetensors")
    refused(holmes("plan", "--steps", "3x"), "--steps")


def test_keys_of_other_programs_and_unquoted_mappings_get_a_hint(holmes):
    for word, key in (
        ("train.learning_rate=1", "train.lr"),
        ("train.batch_size=8", "batch.global_size"),
        ("data.path=x", "data.prefix"),
        ("tp=2", "plan.tp"),
        ("train.step=5", "train.steps"),
    ):
        refused(holmes("plan", word), f"did you mean {key!r}?")
    refused(holmes("plan", "plan.nodes={ib-a:", "2}"), "quote the whole word", "'KEY={a: 1, b: 2}'")
    refused(holmes("plan", "plan.layers_per_stage=[4,", "4]"), "quote the whole word", "'KEY=[1, 2]'")


def test_predict_shows_the_placement_and_uses_sequence_parallelism_as_plan_does(holmes, site):
    layout = ("--site", str(site), "--model", "gpt_3_6b", "--tp", "2", "--pp", "2", "--dp", "16", "--json")
    default, split, unsplit = (
        json.loads(holmes("predict", *layout, *more)[1])
        for more in ((), ("--sequence-parallel",), ("--no-sequence-parallel",))
    )
    assert default == split and unsplit["step_time_s"] > default["step_time_s"]
    assert default["strategy"] == "pipeline" and [c["fabric"] for c in default["components"]] == ["ib-a", "roce-a"]
    sizes = (*layout[:8], "--json")
    (only,) = json.loads(holmes("predict", *sizes, "--nodes", "ib-a=2")[1])["components"]
    assert (only["fabric"], only["nodes"]) == ("ib-a", 2)  # DP is as the nodes have GPUs
    refused(holmes("predict", *sizes, "--nodes", "ib-a=2", "--pp", "3"), "TP x PP x CP is 6, which does not divide 16")
    across = json.loads(holmes("predict", *layout, "--strategy", "hierarchical-dp")[1])
    assert across["strategy"] == "hierarchical-dp" and across["nic_bytes_per_step"] != default["nic_bytes_per_step"]
    assert "  ib-a: 4 nodes x 8 a100-80gb, stage 0, " in holmes("predict", *layout[:-1])[1]


def test_generate_reports_a_missing_package_at_once(holmes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "holmes_hpc.training.checkpoint.generate", None)  # it imports torch
    refused(holmes("generate", str(tmp_path), "--prompt", "x"), "transformers", "pip install")


@pytest.mark.parametrize(
    "command, module, args",
    [
        ("generate", "generate", ["--prompt", "x"]),
        ("export", "export", ["--safetensors", "out"]),
        ("import", "hugging_face_folder", ["-o", "out"]),
    ],
)
def test_slow_work_with_weights_is_shown(holmes, tmp_path, monkeypatch, command, module, args):
    """The import of torch is part of it."""

    class Slow:
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            time.sleep(0.2)
            return lambda *_, **__: "loaded"

    (tmp_path / "holmes.json").touch()
    waiting = console.waiting
    monkeypatch.setattr(console, "waiting", lambda what: waiting(what, after_s=0.05))
    monkeypatch.setattr("holmes_hpc.cli.models.need", lambda _: None)
    monkeypatch.setitem(sys.modules, f"holmes_hpc.training.checkpoint.{module}", Slow())
    assert "the weights: 0 s" in holmes(command, str(tmp_path), *args)[2]


def test_every_command_shows_an_example_and_its_summary_fits(holmes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("--help", "data --help", "sweep --help", "testbed --help"):
        lines = holmes(*command.split())[1].partition("Commands:\n")[2].splitlines()
        summaries = [line.split(maxsplit=1)[1] for line in lines if line.strip()]
        assert summaries and all(len(s) <= 60 and s.endswith(".") and "..." not in s for s in summaries), summaries
    for command in (
        "nodes",
        "probe",
        "label",
        "doctor",
        "plan",
        "predict",
        "calibrate",
        "submit",
        "run",
        "resume",
        "status",
        "logs",
        "cancel",
        "rm",
        "report",
        "import",
        "export",
        "generate",
        "models",
        "batches",
        "data prepare",
        "sweep status",
        "sweep collect",
        "testbed up",
        "testbed status",
        "testbed exec",
        "testbed down",
    ):
        code, out, _ = holmes(*command.split(), "--help")
        assert code == 0 and "Example: " in " ".join(out.split()) and f"holmes {command}" in out, command


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"configuration: data\.prefix is missing; give it"):
        load(["data=indexed"])


def test_predict_accepts_the_sizes_of_a_model(holmes, site, tmp_path):
    layout = [
        "predict",
        "--site",
        str(site),
        "--layers",
        "30",
        "--hidden",
        "3072",
        "--heads",
        "32",
        "--tp",
        "1",
        "--pp",
        "2",
        "--dp",
        "32",
        "--micro-batch",
        "4",
        "--global-batch",
        "768",
        "--sequence",
        "2048",
        "--layers-per-stage",
        "16,14",
        "--recompute",
        "full",
    ]
    code, out, _ = holmes(*layout, "--json", "--trace", str(tmp_path / "trace.json"))
    assert code == 0
    own = json.loads(out)
    code, out, _ = holmes(*layout, "--json", "--transport", "single")
    assert code == 0
    assert json.loads(out)["step_time_s"] > own["step_time_s"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert holmes(*layout, "--json", "--hidden", "3080", "--head-dim", "96")[0] == 0  # no multiple of the heads
    refused(holmes("predict"), "PLAN", "--site")
    refused(holmes("predict", "--site", str(site), "--layers", "30"), "--global-batch")
    refused(holmes("predict", "--site", str(site), "--layers", "30", "--global-batch", "8"), "--sequence")


def test_predict_has_the_defaults_of_plan(holmes, site):
    """The plan's layout, predicted without a batch, a schedule and a recomputation, is the plan's own prediction."""
    code, out, _ = holmes("plan", "model=llama2_7b", "plan.pp=2", "--site", str(site), "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["batch"] == {"global_size": 1024, "micro_size": 1, "sequence_length": 4096}
    sizes = {f"--{name}": str(plan["parallel"][name]) for name in ("tp", "pp", "dp")}
    layers = ",".join(str(s["layers"]) for s in plan["stages"])
    code, out, _ = holmes(
        "predict",
        "--site",
        str(site),
        "--model",
        "llama2_7b",
        *(word for pair in sizes.items() for word in pair),
        "--layers-per-stage",
        layers,
        "--json",
    )
    assert code == 0
    assert json.loads(out)["step_time_s"] == pytest.approx(plan["predicted"]["step_time_s"], rel=1e-3)


def test_a_plan_shows_its_tokens_and_how_long_a_budget_takes(holmes, site, monkeypatch):
    words = ("plan", "model=llama2_7b", "plan.pp=2", "plan.tp=1", "--site", str(site))
    code, out, _ = holmes(*words, "--tokens", "2e12")
    text = " ".join(out.split())
    assert code == 0 and "1024 sequences of 4096 tokens" in text and "(90% interval: " in text
    assert "476,838 steps (2e+12 tokens) take" in text and "days (" in text and len(out.splitlines()) <= 12
    found = json.loads(holmes(*words, "--steps", "100", "--json")[1])
    assert found["throughput"]["tokens"] == 100 * 4194304
    assert found["throughput"]["days"] == pytest.approx(100 * found["predicted"]["step_time_s"] / 86400)
    assert "tokens" not in json.loads(holmes(*words, "--json")[1])["throughput"]  # nobody asked for 20 steps
    refused(holmes(*words, "--tokens", "2e12", "--steps", "3"), "--steps and --tokens")
    for tokens in ("-1", "many", "2X"):
        refused(holmes(*words, "--tokens", tokens), "--tokens", tokens, "300B")
    found = json.loads(holmes(*words, "--tokens", "300B", "--json")[1])
    assert found["throughput"]["tokens"] == pytest.approx(3e11, rel=1e-4)
    refused(holmes("predict", "plan.yaml", "--site", str(site)), "PLAN and --site are mutually exclusive")
    refused(holmes("predict"), "neither PLAN nor --site is given")
    monkeypatch.setenv("HOLMES_SITE", "none.yaml")
    refused(holmes("predict", "--model", "gpt_tiny"), "none.yaml")


def test_random_tokens_must_be_requested(holmes, site, tmp_path):
    refused(holmes("run", "model=gpt_small", "launcher=local"), "no data are given for gpt_small", "data=synthetic")
    plan = tmp_path / "plan.yaml"
    assert holmes("plan", *FIXED, "--site", str(site), "-o", str(plan))[0] == 0
    refused(holmes("submit", str(plan), "--dry-run", f"site_file={site}"), "no data are given for gpt_3_6b")
    words = ("submit", str(plan), f"site_file={site}", "data=synthetic", "name=a b", "+labels.note='$x \"y'")
    code, out, _ = holmes(*words, "--dry-run", "--template", str(tmp_path / "job.sbatch"))
    assert code == 0 and out.startswith("#!/bin/bash\n") and out == (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH hetjob" in out and "set -- site_file=" in out and "data=synthetic" in out and f'{plan}}}"' in out
    assert 'run="${RUN:-' in out and "/a b}" in out
    shellcheck = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "-"], input=out, text=True, capture_output=True, check=False
    )
    assert shellcheck.returncode == 0, shellcheck.stdout
    assert json.loads(holmes(*words, "--dry-run", "--json")[1])["script"] == out
    assert "The job checks it only when it starts." in out
    refused(holmes(*words, "train.stpes=5", "--template", str(tmp_path / "other")), "did you mean 'train.steps'?")
    assert not (tmp_path / "other").exists()


def test_predict_shows_the_days_of_a_budget(holmes, site):
    layout = ["--model", "gpt_3_6b", "--tp", "8", "--pp", "1", "--dp", "2", "--global-batch", "64", "--nodes", "ib-a=2"]
    words = ["predict", "--site", str(site), *layout]
    code, out, err = holmes(*words, "--tokens", "300B", "--json")
    assert code == 0, err
    found = json.loads(out)
    steps = found["throughput"]["steps"]
    assert steps == math.ceil(3e11 / found["throughput"]["tokens_per_step"])
    assert found["throughput"]["days"] == pytest.approx(steps * found["step_time_s"] / 86400)
    code, out, _ = holmes(*words, "--steps", "100")
    assert code == 0 and "100 steps (" in out
    refused(holmes(*words, "--tokens", "2e12", "--steps", "3"), "--steps and --tokens")
    refused(holmes(*words, "--steps", "0"), "steps")


def test_predict_does_not_search(holmes, site):
    """Layers are even by default, even if the planner would choose others. A layout that does not fit is predicted."""
    layout = [
        "predict",
        "--site",
        str(site),
        "--model",
        "gpt_3_6b",
        "--pp",
        "2",
        "--dp",
        "32",
        "--micro-batch",
        "4",
        "--global-batch",
        "768",
        "--recompute",
        "full",
        "--schedule",
        "1f1b",
    ]
    given, even, uneven = (
        json.loads(holmes(*layout, "--json", *more)[1])["step_time_s"]
        for more in ((), ("--layers-per-stage", "15,15"), ("--layers-per-stage", "20,10"))
    )
    assert given == even < uneven
    large = [word if word != "gpt_3_6b" else "gpt_39b" for word in layout]
    code, out, _ = holmes(*large)
    assert code == 0 and "it does not fit: " in " ".join(out.split())


def test_predict_has_options_for_the_software(holmes, site, tmp_path):
    layout = [
        "predict",
        "--site",
        str(site),
        "--model",
        "gpt_3_6b",
        "--tp",
        "2",
        "--pp",
        "2",
        "--dp",
        "16",
        "--micro-batch",
        "2",
        "--global-batch",
        "512",
    ]

    def predicted(*more: str) -> dict:
        code, out, err = holmes(*layout, "--json", *more)
        assert code == 0, err
        return json.loads(out)

    plain = predicted()
    low, high = plain["interval_s"]
    assert low < plain["step_time_s"] < high
    for more in (
        ("--attention", "unfused", "--dropout", "0.1"),
        ("--fused-norm", "no", "--ffn", "20480"),
        ("--overlap-grad-reduce", "no", "--overlap-param-gather", "no"),
        ("--sharding", "full"),
        ("--head-dim", "128"),
        ("--fused-wgrad", "no"),
        ("--tied",),
        ("--recompute", "selective", "--recompute-parts", "scores,ffn"),
        ("--recompute", "full", "--recompute-layers", "2"),
    ):
        assert predicted(*more)["step_time_s"] > plain["step_time_s"], more
    for more in (("--gpu", "h100"), ("--grad-dtype", "bf16", "--kv-heads", "8"), ("--overlap-tp", "yes")):
        assert predicted(*more)["step_time_s"] < plain["step_time_s"], more
    assert predicted("--sharding", "none")["memory_bytes_per_gpu"] > plain["memory_bytes_per_gpu"]
    sharded, hybrid = (predicted("--sharding", "full", *more) for more in ((), ("--instances", "4")))  # HSDP
    assert hybrid["step_time_s"] < sharded["step_time_s"]
    assert hybrid["memory_bytes_per_gpu"] > sharded["memory_bytes_per_gpu"]
    assert "90% interval" in holmes(*layout)[1]
    text = " ".join(holmes(*layout, "--overlap-grad-reduce", "no", "--overlap-param-gather", "yes")[1].split())
    assert "Note: train.overlap_param_gather has no effect with train.overlap_grad_reduce=false" in text
    for more, message in (
        (("--attention", "fast"), "attention is 'fast'"),
        (("--fused-norm", "maybe"), "neither yes nor"),
        (("--grad-dtype", "fp8"), "grad_dtype is 'fp8'"),
        (("--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("--sharding", "hsdp"), "sharding is 'hsdp'"),
        (("--sharding", "none", "--instances", "2"), "need the distributed optimizer"),
        (("--instances", "3"), "dp=16 cannot be cut into 3 equal optimizer instances"),
        (("--kv-heads", "7"), "7 kv_heads"),
        (("--attention", "flash", "--dtype", "fp32"), "attention flash supports only fp16"),
        (("--sharding", "full", "--overlap-grad-reduce", "no"), "sharding=full requires overlap"),
        (("--recompute", "none", "--recompute-layers", "2"), "recomputation is none"),
        (("--overlap-tp", "yes", "--no-sequence-parallel"), "--overlap-tp: it requires TP above 1"),
        (("--overlap-tp", "yes", "--tp", "1", "--dp", "32"), "--overlap-tp: it requires TP above 1"),
        (("--aligned-gather", "yes", "--overlap-param-gather", "no"), "--aligned-gather: it requires"),
        (("--expert-imbalance", "1.5"), "--expert-imbalance: it has no effect, because the model has no experts"),
        (("--fp8", "yes"), "no FP8 figures for a100-80gb"),
        (("--fp8", "delayed"), "no FP8 figures for a100-80gb"),
        (("train.fp8=delayed",), "no FP8 figures for a100-80gb"),
        (("--gpu", "h100", "train.fp8=mxfp8"), "mxfp8 needs Blackwell GPUs, not h100; use train.fp8=delayed"),
        (("--attention", "flash3"), "a100-80gb cannot run flash3"),
        (("--attention", "flash", "--gpu", "v100-32gb"), "has no FlashAttention; use sdpa or softmax"),
        (("--cp", "3"), "is not a multiple of 6 (2 x CP 3)"),
        (("--layers-per-stage", "16,15"), "are 31 layers, gpt_3_6b has 30"),
        (("--recompute", "selective", "--recompute-parts", "all"), "unknown part 'all'"),
    ):
        refused(holmes(*layout, *more), message)
    out = holmes(*layout, "--gpu", "v100-32gb", "--dtype", "bf16")[1]
    assert "v100-32gb has no bf16: predicted as fp16" in out and "v100-32gb has no FlashAttention" in out
    path = tmp_path / "plan.yaml"
    assert holmes("plan", *FIXED, "--site", str(site), "-o", str(path))[0] == 0
    for option, value in (("--gpu", "h100"), ("--transport", "single"), ("--pp", "4"), ("--layers-per-stage", "16,16")):
        refused(holmes("predict", str(path), option, value), "the PLAN already contains it", option)


def test_predict_reads_arguments_of_megatron(holmes, site, tmp_path):
    """They mean the same as the options; what the user sets beside them wins."""
    words = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    words += " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 32000"
    words += " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 4096"
    words += " --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 4 --sequence-parallel --bf16"
    words += " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --use-distributed-optimizer"
    words += " --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap --context-parallel-size 2 --lr 1e-4"
    script = tmp_path / "train.sh"
    lines = words.replace(" --", " # comment\n  --")
    script.write_text(f"ARGS=(\n  {lines}\n)\ntorchrun --nnodes 4 pretrain_gpt.py $ARGS\n")
    given = ("predict", "--site", str(site), "--nodes", "ib-a=4", "--json")
    code, out, err = holmes(*given, "--megatron-args", f"torchrun --nnodes 4 pretrain_gpt.py {words}")
    assert code == 0, err
    assert "plan: tp=4, pp=2, cp=2, virtual_stages=4, " in err and "overlap_tp=yes" in err and "ignored: --lr" in err
    assert out == holmes(*given, "--megatron-args", str(script))[1]
    options = (
        "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 10880 --swiglu --rmsnorm --rope --no-tied --no-bias"
    )
    options += (
        " --vocab 32000 --sequence 4096 --micro-batch 1 --global-batch 64 --tp 4 --pp 2 --cp 2 --dp 2 --dtype bf16"
    )
    options += " --virtual-stages 4 --overlap-tp yes --aligned-gather yes --schedule interleaved --transport single"
    words_of_options = [*options.split(), "--recompute", "none", "plan.bucket_bytes=160000000"]
    by_options, by_arguments = (json.loads(text) for text in (holmes(*given, *words_of_options)[1], out))
    assert set(by_arguments.pop("assumptions")) < set(by_options.pop("assumptions"))  # which do not name the attention
    assert by_options == by_arguments
    slower = json.loads(holmes(*given, "--megatron-args", words, "--overlap-tp", "no")[1])
    assert slower["step_time_s"] > json.loads(out)["step_time_s"]
    refused(holmes(*given, "--megatron-args", words, "--model", "gpt_3_6b"), "leave out the other model")
    missing = "--num-attention-heads, --seq-length, --micro-batch-size, --global-batch-size is missing"
    refused(holmes(*given, "--megatron-args", "--num-layers 2 --vocab-size 9", "--hidden", "64"), missing)
    on_v100 = (*given, "--gpu", "v100-32gb", "--megatron-args", words, "--overlap-tp", "no")
    assert holmes(*on_v100)[1] == holmes(*on_v100, "--attention", "softmax")[1]


def test_arguments_of_megatron_give_the_prediction_of_a_published_run(holmes, tmp_path):
    """One of Llama 3.1 8B by NVIDIA, with context parallelism and FlashAttention-3, on 32 H100."""
    run = next(run for run in read(["dgxc_llama"]) if run.gpus == 32 and not run.fp8)
    words = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    words += (
        " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --position-embedding-type rope --vocab-size 128256"
    )
    words += " --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
    words += f" --seq-length 8192 --micro-batch-size {run.micro_size} --global-batch-size {run.global_size}"
    words += f" --tensor-model-parallel-size {run.tp} --context-parallel-size {run.cp} --bf16 --grad-reduce-in-bf16"
    words += " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    gpu = {"name": "h100", "peak_tflops": 989, "memory_gib": 80, "intra_node_gbps": 3600}
    pool = {"name": "a", "nic": "ib", "rdma_gbps": 3200, "partition": "p", "nodes": 4, "gpus_per_node": 8, "gpu": gpu}
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"name": "h100", "ethernet_gbps": 25, "fabrics": [pool]}))
    code, out, err = holmes("predict", "--site", str(site), "--json", "--megatron-args", words)
    assert code == 0, err
    assert json.loads(out)["step_time_s"] == pytest.approx(predicted_s(run), rel=1e-3)


def test_predict_reads_a_hugging_face_config(holmes, site, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(named("llama3_8b"), "bfloat16")))
    given = ("predict", "--site", str(site), "--dp", "8", "--tp", "8", "--json")
    code, out, err = holmes(
        *given, "--model-file", str(file), "--global-batch", "512", "--micro-batch", "1", "--sequence", "8192"
    )
    assert code == 0, err
    assert json.loads(out) == json.loads(holmes(*given, "--model", "llama3_8b")[1])
    refused(holmes(*given, "--model-file", str(tmp_path / "none.json")), "none.json")


def test_predict_says_what_a_trial_of_a_layout_needs_to_know(holmes, site):
    """Waits for FSDP's exchanges, layouts that do not fit, and schedules without virtual stages."""
    given = ("predict", "--site", str(site), "--model", "llama2_7b", "--micro-batch", "1")
    code, out, err = holmes(*given, "--dp", "16", "--nodes", "ib-a=2", "--sharding", "full", "--explain")
    assert code == 0 and "waiting for exchanges of FSDP over NICs" in " ".join(out.split()), err
    code, out, err = holmes(*given, "--dp", "16", "--nodes", "ib-a=2", "--no-distributed-optimizer", "--json")
    assert code == 0 and any("it does not fit" in text for text in json.loads(out)["assumptions"]), err
    interleaved = ("--schedule", "interleaved", "--pp", "2", "--dp", "8")
    refused(holmes(*given, *interleaved), "interleaved has at least 2 virtual stages", "use 1f1b")
    refused(holmes(*given, "--gpu", "v100-32gb", "--dtype", "fp16", "--attention", "flash3"), "use sdpa or softmax")


def test_plan_and_predict_accept_the_same_options_and_keys(holmes, site):
    """Every option sets its key, in both commands."""
    options = ["--model", "gpt_3_6b", "--global-batch", "64", "--micro-batch", "2", "--tp", "2", "--pp", "2"]
    options += ["--nodes", "ib-a=1,roce-a=1", "--layers-per-stage", "16,14", "--no-distributed-optimizer"]
    options += ["--recompute", "full", "--overlap-grad-reduce", "no", "--dtype", "fp16", "--vocab", "60000"]
    keys = ["model=gpt_3_6b", "batch.global_size=64", "batch.micro_size=2", "plan.tp=2", "plan.pp=2"]
    keys += ["plan.nodes={ib-a: 1, roce-a: 1}", "plan.layers_per_stage=[16,14]", "plan.distributed_optimizer=false"]
    keys += ["plan.recompute=full", "train.overlap_grad_reduce=false", "train.dtype=fp16", "model.vocab=60000"]
    for command, more in (("plan", []), ("predict", ["--dp", "4"])):
        results = [
            json.loads(holmes(command, f"site_file={site}", "--json", *more, *words)[1]) for words in (options, keys)
        ]
        mixed = holmes(command, "--site", str(site), "--json", *more, *options, *keys)  # the same twice
        assert results[0] == results[1] == json.loads(mixed[1]), command
        assert "gpt_tiny" not in mixed[2]


@pytest.mark.parametrize("command", ["plan", "predict"])
def test_two_spellings_with_different_values_are_refused(holmes, site, command):
    for option, value, key in (
        ("--tp", "2", "plan.tp=4"),
        ("--nodes", "ib-a=2", "plan.nodes={ib-a: 3}"),
        ("--nodes", "ib-a=2", "+plan.nodes.roce-a=2"),
        ("--model", "gpt_7_5b", "model=gpt_3_6b"),
        ("--site", str(site), "site_file=other.yaml"),
    ):
        words = [option, value, *([] if option == "--site" else ["--site", str(site)])]
        refused(holmes(command, key, *words), option, key, "differ")
    refused(holmes(command, "--site", str(site), "--nodes", "ib-a"), "--nodes", "POOL=NODES")
    refused(holmes(command, "--site", str(site), "--layers-per-stage", "a,b"), "--layers-per-stage", "write 26,22")
    refused(holmes(command, "--site", str(site), "--model", "gpt_3_6b", "tp=2"), "did you mean 'plan.tp'?")
    refused(holmes(command, "--site", str(site), "--model", "gpt_3_6"), "did you mean 'gpt_3_6b'?")


def test_predict_chooses_the_faster_sharding(holmes, site):
    layout = ("--tp", "1", "--pp", "2", "--dp", "32", "--schedule", "interleaved", "--virtual-stages", "5")
    given = ("predict", "--site", str(site), "--model", "gpt_3_6b", *layout, "--transport", "single", "--json")
    free, replicated, sharded = (
        json.loads(holmes(*given, *more)[1])["step_time_s"]
        for more in ((), ("--no-distributed-optimizer",), ("--distributed-optimizer",))
    )
    assert free == min(replicated, sharded)


def test_predict_refuses_options_that_the_plan_sets(holmes, site, tmp_path):
    path = tmp_path / "plan.yaml"
    assert holmes("plan", *FIXED, "--site", str(site), "-o", str(path))[0] == 0
    for key in ("plan.tp=2", "batch.global_size=8", "model=gpt_tiny"):
        refused(holmes("predict", str(path), key), "the PLAN already contains it", key)
    by_key, by_name = (
        holmes("predict", word, "train.steps=5", "--json")[1] for word in (f"plan_file={path}", str(path))
    )
    assert by_key == by_name and json.loads(by_key)["throughput"]["steps"] == 5
    refused(holmes("predict", str(path), "plan_file=other.yaml"), "plan_file is other.yaml")
    given = ("predict", "--site", str(site), "--model", "gpt_3_6b", "--dp", "8", "--nodes", "ib-a=1")
    refused(holmes(*given, "--sharding", "none", "--distributed-optimizer"), "--sharding none")
    refused(holmes(*given, "--distributed-optimizer", "yes"), "--distributed-optimizer: it takes no value, but 'yes'")
    refused(holmes(*given, "plan.unequal=true"), "plan.unequal: stages of a given layout are alike; leave it out")
    refused(holmes("plan", *given[1:3], "--no-distributed-optimizer", "no"), "it takes no value, but 'no' follows")


def test_plan_without_a_model_names_the_default(holmes, site):
    code, out, err = holmes("plan", "--site", str(site), "--nodes", "ib-a=1")
    assert code == 0 and "no model is given: this plans gpt_tiny" in err and "no model" not in out
    code, out, err = holmes("plan", "--site", str(site), "--nodes", "ib-a=1", "--json")
    assert json.loads(out)["model"]["name"] == "gpt_tiny" and err.count("gpt_tiny") == 1


def test_plan_and_predict_describe_the_same_model_without_a_name(holmes, site):
    given = ("--site", str(site), "--nodes", "ib-a=1", "--layers", "8", "--hidden", "1024", "--heads", "16")
    for command in ("plan", "predict"):
        refused(holmes(command, *given), "a model without a name has no default batch", "--global-batch")
    code, out, err = holmes("plan", *given, "--global-batch", "16", "--sequence", "512", "--json")
    assert code == 0 and "gpt_tiny" not in err, err
    found = json.loads(out)
    sizes = {"name": "gpt", "layers": 8, "hidden": 1024, "ffn": 4096, "max_positions": 512, "swiglu": False}
    assert found["model"].items() >= sizes.items() and found["batch"]["sequence_length"] == 512


def test_pace_factors_of_an_unknown_pool_are_refused(holmes, site, tmp_path):
    """Before planning, and for a finished plan."""
    given, target = ("--site", str(site), "train.pace_layer_ms=1"), tmp_path / "plan.yaml"
    for known in ("roce-a: 2", "n3: 2"):
        assert holmes("plan", *given, "--nodes", "ib-a=1", f"train.pace_factors={{{known}}}", "-o", str(target))[0] == 0
    for command in (("plan",), ("run",), ("submit", str(target)), ("submit", str(target), "--dry-run")):
        message = ("train.pace_factors: no pool or node 'roce'", "roce-a")
        refused(holmes(*command, *given, "train.pace_factors={roce: 2}"), *message)


def test_submit_refuses_what_plan_refuses(holmes, site, tmp_path, monkeypatch):
    """And scripts for sbatch are refused too."""
    given, target = ("--site", str(site), "--nodes", "ib-a=1"), tmp_path / "plan.yaml"
    assert holmes("plan", *given, "-o", str(target))[0] == 0
    monkeypatch.setattr(requirements, "installed_version", lambda package: "0.1")
    requirements.check_megatron_core.cache_clear()
    submit = ("submit", str(target), "--site", str(site))
    commands = (("plan", *given), submit, (*submit, "--dry-run"), (*submit, "--template", str(tmp_path / "job")))
    for override, message in (
        ("train.fp8=mxfp8", "no FP8 figures for a100-80gb"),
        ("train.optimizer=muon", "train.optimizer: muon needs megatron-core>=0.18, 0.1 is installed"),
    ):
        for command in commands:
            refused(holmes(*command, override), message)
    assert "elastic have no effect without --elastic" in holmes(*submit, "--dry-run", "elastic.spares=2")[2]
    assert "elastic" not in holmes(*submit, "--dry-run")[2]


def test_the_planner_assumes_the_dtype_of_training(holmes, site):
    memory = {}
    for dtype in ("auto", "bf16", "fp32"):
        code, out, _ = holmes(
            "plan",
            "model=gpt_3_6b",
            "batch=paper_3_6b",
            "--site",
            str(site),
            "plan.tp=1",
            "plan.pp=2",
            "plan.recompute=none",
            "plan.schedule=1f1b",
            "plan.layers_per_stage=[15,15]",
            "plan.max_memory_gib=inf",
            "batch.micro_size=1",
            f"train.dtype={dtype}",
            "--json",
        )
        assert code == 0
        memory[dtype] = max(json.loads(out)["predicted"]["memory_bytes_per_gpu"])
    assert memory["auto"] == memory["bf16"] < 0.8 * memory["fp32"]
    refused(holmes("plan", "--site", str(site), "train.dtype=fp8"), "train.dtype")


def test_a_record_without_a_configuration_is_not_resumed(holmes, tmp_path):
    target = tmp_path / "plan.yaml"
    assert holmes("plan", *local(), "-o", str(target))[0] == 0
    run = RunDirectory.create(tmp_path / "runs" / "mine", plan_text=target.read_text())
    refused(holmes("resume", "mine"), "configuration", str(run.path))


def test_probe_of_a_missing_tree(holmes, tmp_path):
    refused(holmes("probe", "--sysfs", str(tmp_path / "none")), "none")


def test_bad_output_paths_and_names_are_refused(holmes, site, tmp_path):
    refused(holmes("plan", "--site", str(site), "-o", str(tmp_path / "none" / "plan.yaml")), "plan.yaml")
    refused(holmes("plan", "--site", str(site), "-o", str(tmp_path)), str(tmp_path))
    refused(holmes("predict", "plan.yaml", "--trace", str(tmp_path / "none" / "x")), "none/x")
    refused(holmes("calibrate", "launcher=local", "-o", str(tmp_path / "none" / "x")), "none/x")
    refused(holmes("report", str(tmp_path), "--trace", str(tmp_path / "none" / "x")), "none/x")
    for name in ("name=a/b", "name=-rf", "name=%j", f"name={'n' * 300}", "name=größe"):
        refused(holmes("run", *local(name)), "%" if name == "name=%j" else "name")


def test_a_run_directory_with_other_files_is_refused(holmes, tmp_path):
    mine = tmp_path / "work"
    mine.mkdir()
    (mine / "thesis.tex").write_text("all of it")
    refused(holmes("run", *local(f"run_dir={mine}")), "the directory is not empty")
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]


def test_keys_that_the_plan_sets_cannot_be_overridden(holmes, tmp_path, monkeypatch):
    target = tmp_path / "plan.yaml"
    assert holmes("plan", *local(), "-o", str(target))[0] == 0
    for override in ("model=gpt_small", "batch.global_size=4", "plan.tp=2"):
        refused(holmes("submit", str(target), "--dry-run", "launcher=local", override), override, "fixed by the plan")
    assert holmes("submit", str(target), "--dry-run", "launcher=local", "plan.pp=2", "train.steps=3")[0] == 2
    assert plan_run(["launcher=local"], plan_file=str(target))[0].world_size == 4  # as many ranks as the plan has


def test_layers_of_another_number_of_stages_are_refused(holmes, site):
    given = ("--model", "gpt_3_6b", "--site", str(site), "--micro-batch", "4", "--global-batch", "768")
    refused(
        holmes("predict", *given, "--pp", "3", "--dp", "16", "--layers-per-stage", "10,10"),
        "2 entries, pp is 3",
        "pp is 3",
    )
    refused(holmes("plan", "model=gpt_3_6b", "--site", str(site), "plan.layers_per_stage=[10,10]"))
    ends = (
        *given,
        "--nodes",
        "ib-a=4",
        "--pp",
        "4",
        "--dp",
        "8",
        "--virtual-stages",
        "8",
    )  # without layers at the ends
    assert holmes("predict", *ends, "--layers-per-stage", "7,8,8,7")[0] == 0
    refused(holmes("predict", *ends, "--layers-per-stage", "8,7,8,7"), "each virtual stage but the first and the last")


def test_an_unknown_option_of_a_group_gets_the_allowed_ones(holmes, site):
    code, _, err = holmes("plan", "--site", str(site), "data=nope")
    assert code == 2 and err == "holmes: overrides: no data 'nope'; choose one of: default, indexed, synthetic\n"


def test_a_named_model_accepts_another_vocabulary(holmes, site):
    def predicted(*more: str) -> float:
        code, out, _ = holmes(
            "predict",
            "--site",
            str(site),
            "--model",
            "gpt_3_6b",
            "--pp",
            "2",
            "--dp",
            "32",
            "--micro-batch",
            "4",
            "--global-batch",
            "768",
            "--json",
            *more,
        )
        assert code == 0
        return json.loads(out)["step_time_s"]

    assert predicted("--vocab", "200000") > predicted()


@pytest.mark.parametrize(
    "words", [["train.stps=2"], ["train.steps=0"], ["-m", "hydra/launcher=holmes_local", "train.steps=0"]]
)
def test_the_hydra_application_refuses_in_one_line(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "holmes_hpc.train", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("holmes: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_is_no_error(site, form):
    """`holmes ... | head`: the pipe is closed before anything is written."""
    words = ["plan", *FIXED, "--site", str(site), *form]
    with subprocess.Popen(
        [sys.executable, "-m", "holmes_hpc.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        error_output = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in error_output, error_output


def test_ctrl_c_is_said(holmes, site, monkeypatch):
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holmes_hpc.planning.request.make_plan", interrupt)
    code, out, err = holmes("plan", "model=gpt_tiny", "--site", str(site))
    assert (code, out) == (130, "") and err.splitlines()[-1] == "holmes: interrupted"


def test_ctrl_c_while_modules_are_imported_prints_nothing(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from holmes_hpc.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_plan_for_gpus_without_bf16_says_so(holmes, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(TWO.replace("a100-80gb, peak", "v100-32gb, peak"))
    code, out, _ = holmes("plan", "model=gpt_small", "--site", str(path), "--json")
    assert code == 0, out
    text = " ".join(json.loads(out)["assumptions"])
    assert "v100-32gb has no bf16" in text and "no FlashAttention" in text


@pytest.mark.parametrize(
    ("device", "link", "warns"),
    [("cpu", "local", False), ("cpu", "local.all_gather", False), ("cpu", "ethernet", True), ("A100", "local", True)],
)
def test_calibrate_warns_only_of_rates_that_the_site_gave(device: str, link: str, warns: bool, capfd) -> None:
    _show_pool(MeasuredPool("ib-a", "", device, links={link: Link(1e-5, 1.49)}), "title")
    assert (f"{link} 1.49 times the site's rate" in capfd.readouterr().err) == warns


def test_the_help_of_sweeps_says_how_to_start_one(holmes):
    assert "holmes-train -m KEY=VALUE,VALUE" in " ".join(holmes("sweep", "--help")[1].split())


def test_the_help_of_aligned_gather_names_its_default_of_holmes():
    assert SOFTWARE_FLAGS["--aligned-gather"].help == (
        "aligned_gather: all stages gather at once; default: yes unless transport=single [true or false]"
    )


def test_an_unknown_option_gets_the_key_or_the_answer_but_no_lookalike(holmes):
    for option, hint in (
        ("--precision", "no option --precision: write train.dtype=…;"),
        ("--elastic", "no option --elastic: write elastic.enabled=…;"),
        ("--context-parallel", "no option --context-parallel: write plan.cp=…;"),
        ("--modle", "did you mean '--model'?"),
        ("--dry-run", "no option --dry-run: `holmes submit PLAN --dry-run` prints the batch script; see"),
        ("--zzz", "no option --zzz; see"),
    ):
        refused(holmes("plan", option, "1"), hint)
