"""The `holmes` command as people type it: exit codes, one line for bad input, JSON that parses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import holmes, refused  # noqa: F401 (a fixture)

from holmes_hpc.config.composition import load
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.run import RunDirectory

pytestmark = pytest.mark.integration

TWO = """
name: two-clusters
ethernet_gbps: 25
gpu: {name: a100-80gb, peak_tflops: 312, memory_gib: 80, intra_node_gbps: 2400}
fabrics:
  - {name: ib-a, nic: ib, rdma_gbps: 200, partition: gpu-ib, nodes: 4, gpus_per_node: 8}
  - {name: roce-a, nic: roce, rdma_gbps: 200, partition: gpu-roce, nodes: 4, gpus_per_node: 8}
"""


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


def test_json_of_a_plan_is_one_document(holmes, site):
    code, out, _ = holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", "--site", str(site), "--json")
    assert code == 0
    found = json.loads(out)
    for key in ("version", "strategy", "model", "batch", "parallel", "recompute", "schedule", "bucket_bytes",
                "edge_dtype", "components", "stages", "transports", "predicted", "assumptions", "alternatives"):
        assert key in found, key
    for key in ("step_time_s", "samples_per_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu",
                "memory_bytes_per_gpu", "nic_bytes_per_step", "breakdown"):
        assert key in found["predicted"], key


@pytest.mark.parametrize(("overrides", "words"), [
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
])
def test_bad_input_is_one_line_and_code_2(holmes, site, overrides, words):
    refused(holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", *overrides, "--site", str(site)), *words)


def test_bad_site_files(holmes, tmp_path):
    for text, words in ((TWO.replace("rdma_gbps: 200", "rdma_gbps: -1"), ["rdma_gbps", "-1"]),
                        (TWO.replace("nodes: 4", "nodes: 0"), ["nodes"]),
                        (TWO.replace("partition:", "partitoin:"), ["partitoin", "partition"]),
                        ("{", ["YAML"])):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        refused(holmes("plan", "--site", str(path)), "bad.yaml", *words)
    refused(holmes("plan", "--site", str(tmp_path / "none.yaml")), "none.yaml")


def test_what_nothing_can_be_learned_from_is_refused(holmes, site, tmp_path):
    refused(holmes("plan", "--learn", str(tmp_path), "--site", str(site)), "no run to learn from", "--learn")
    plan = tmp_path / "plan.yaml"
    assert holmes("plan", "--site", str(site), "model=gpt_3_6b", "-o", str(plan))[0] == 0
    refused(holmes("plan", f"plan_file={plan}", "--learn", str(tmp_path)), "plan_file names a plan already")


def test_a_bad_calibration_file_is_named(holmes, site, tmp_path):
    path = tmp_path / "bad.cal.yaml"
    path.write_text("device: cpu\npats: []\n")
    refused(holmes("plan", f"calibration={path}", "--site", str(site)), "bad.cal.yaml", "pats")


def test_status_says_that_there_are_no_runs(holmes, tmp_path):
    code, out, err = holmes("status")
    assert code == 0 and not out and "no runs in" in err
    assert holmes("status", "--json")[1].strip() == "[]"


def local(*more: str) -> list[str]:
    return ["launcher=local", "plan.pp=2", "plan.dp=2", *more]


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
    holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", "plan.strategy=pipeline", "plan.pp=2", "plan.tp=1",
           "--site", str(site), "-o", str(target))
    data = yaml.safe_load(target.read_text())
    data["parallel"]["order"] = "tp-cp-ep-pp-dp"
    del data["transports"]
    target.write_text(yaml.safe_dump(data))
    refused(holmes("submit", str(target), "--dry-run"), "dp group", "ib-a", "roce-a")


def test_a_broken_plan_file(holmes, tmp_path):
    path = tmp_path / "plan.yaml"
    refused(holmes("submit", str(path)), "plan.yaml")
    path.write_text("version: 99\nmodel: 3\n")
    refused(holmes("submit", str(path)), "plan.yaml")


def test_unknown_runs_are_named(holmes):
    for verb in ("status", "logs", "cancel", "report"):
        refused(holmes(verb, "no-such-run"), "no-such-run")


def test_unknown_verbs_and_options(holmes):
    refused(holmes("pln"), "pln")
    refused(holmes("plan", "--sight", "x"), "--sight")


def test_every_verb_shows_an_example(holmes):
    for verb in ("nodes", "probe", "label", "doctor", "plan", "predict", "calibrate", "submit", "run", "resume",
                 "status", "logs", "cancel", "report", "import", "export", "generate", "data prepare",
                 "sweep status", "sweep collect", "testbed up", "testbed status", "testbed exec", "testbed down"):
        code, out, _ = holmes(*verb.split(), "--help")
        assert code == 0 and "Example: " in " ".join(out.split()) and f"holmes {verb}" in out, verb


def test_configuration_names_what_is_missing():
    with pytest.raises(ConfigError, match="prefix"):
        load(["data=indexed"])


def test_predict_takes_a_layout_by_its_sizes(holmes, site, tmp_path):
    layout = ["predict", "--site", str(site), "--layers", "30", "--hidden", "3072", "--heads", "32", "--tp", "1",
              "--pp", "2", "--dp", "32", "--micro-batch", "4", "--global-batch", "768", "--layers-per-stage", "16,14",
              "--recompute", "full"]
    code, out, _ = holmes(*layout, "--json", "--trace", str(tmp_path / "trace.json"))
    assert code == 0
    own = json.loads(out)
    code, out, _ = holmes(*layout, "--json", "--transport", "single")
    assert code == 0
    assert json.loads(out)["step_time_s"] > own["step_time_s"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    refused(holmes("predict"), "PLAN", "--site")
    refused(holmes("predict", "--site", str(site), "--layers", "30"), "--global-batch")


def test_predict_searches_for_nothing(holmes, site):
    """Layers not given are even, also where the planner would not have them so; what does not fit is predicted."""
    layout = ["predict", "--site", str(site), "--model", "gpt_3_6b", "--pp", "2", "--dp", "32", "--micro-batch", "4",
              "--global-batch", "768", "--recompute", "full"]
    given, even, uneven = (json.loads(holmes(*layout, "--json", *more)[1])["step_time_s"] for more in (
        (), ("--layers-per-stage", "15,15", "--schedule", "1f1b"), ("--layers-per-stage", "20,10")))
    assert given == even < uneven
    large = [word if word != "gpt_3_6b" else "gpt_39b" for word in layout]
    code, out, _ = holmes(*large)
    assert code == 0 and "it does not fit: " in " ".join(out.split())


def test_predict_is_told_what_the_software_does(holmes, site, tmp_path):
    layout = ["predict", "--site", str(site), "--model", "gpt_3_6b", "--tp", "2", "--pp", "2", "--dp", "16",
              "--micro-batch", "2", "--global-batch", "512"]

    def predicted(*more: str) -> dict:
        code, out, err = holmes(*layout, "--json", *more)
        assert code == 0, err
        return json.loads(out)

    plain = predicted()
    low, high = plain["interval_s"]
    assert low < plain["step_time_s"] < high
    for more in (("--attention", "unfused", "--dropout", "0.1"), ("--fused-norm", "no", "--ffn", "20480"),
                 ("--overlap-grad-reduce", "no", "--overlap-param-gather", "no"), ("--sharding", "full")):
        assert predicted(*more)["step_time_s"] > plain["step_time_s"], more
    for more in (("--gpu", "h100"), ("--grad-dtype", "bf16", "--kv-heads", "8")):
        assert predicted(*more)["step_time_s"] < plain["step_time_s"], more
    assert predicted("--sharding", "none")["memory_bytes_per_gpu"] > plain["memory_bytes_per_gpu"]
    assert "nine of ten like runs" in holmes(*layout)[1]
    for more, said in ((("--attention", "fast"), "attention is 'fast'"), (("--fused-norm", "maybe"), "neither yes nor"),
                       (("--grad-dtype", "fp8"), "unknown dtype 'fp8'"), (("--gpu", "abacus"), "unknown GPU 'abacus'"),
                       (("--sharding", "half"), "unknown sharding"), (("--kv-heads", "7"), "7 kv_heads"),
                       (("--attention", "flash", "--dtype", "fp32"), "attention is flash, which computes in fp16"),
                       (("--sharding", "full", "--overlap-grad-reduce", "no"), "not overlapped")):
        refused(holmes(*layout, *more), said)
    path = tmp_path / "plan.yaml"
    assert holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", "--site", str(site), "-o", str(path))[0] == 0
    refused(holmes("predict", str(path), "--gpu", "h100"), "a PLAN has its own", "--gpu")


def test_the_planner_counts_the_type_that_training_uses(holmes, site):
    memory = {}
    for dtype in ("auto", "bf16", "fp32"):
        code, out, _ = holmes("plan", "model=gpt_3_6b", "batch=paper_3_6b", "--site", str(site), "plan.tp=1",
                              "plan.pp=2", "plan.recompute=none", "plan.schedule=1f1b", "plan.layers_per_stage=[15,15]",
                              "plan.max_memory_gib=1000", "batch.micro_size=1", f"train.dtype={dtype}", "--json")
        assert code == 0
        memory[dtype] = max(json.loads(out)["predicted"]["memory_bytes_per_gpu"])
    assert memory["auto"] == memory["bf16"] < 0.8 * memory["fp32"]
    refused(holmes("plan", "--site", str(site), "train.dtype=fp8"), "train.dtype")


def test_a_record_without_a_configuration_is_not_resumed(holmes, tmp_path):
    target = tmp_path / "plan.yaml"
    assert holmes("plan", *local(), "-o", str(target))[0] == 0
    run = RunDirectory.create(tmp_path / "runs" / "mine", plan_text=target.read_text())
    refused(holmes("resume", "mine"), "configuration", str(run.path))


def test_probe_of_a_tree_that_is_not_there(holmes, tmp_path):
    refused(holmes("probe", "--sysfs", str(tmp_path / "none")), "none")


def test_output_and_names_that_cannot_be(holmes, site, tmp_path):
    refused(holmes("plan", "--site", str(site), "-o", str(tmp_path / "none" / "plan.yaml")), "plan.yaml")
    refused(holmes("plan", "--site", str(site), "-o", str(tmp_path)), str(tmp_path))
    refused(holmes("predict", "plan.yaml", "--trace", str(tmp_path / "none" / "x")), "none/x")
    refused(holmes("calibrate", "launcher=local", "-o", str(tmp_path / "none" / "x")), "none/x")
    refused(holmes("report", str(tmp_path), "--trace", str(tmp_path / "none" / "x")), "none/x")
    for name in ("name=a/b", "name=%j", f"name={'n' * 300}", "name=größe"):
        refused(holmes("run", *local(name)), "%" if name == "name=%j" else "name")


def test_a_run_directory_with_other_files_is_let_be(holmes, tmp_path):
    mine = tmp_path / "work"
    mine.mkdir()
    (mine / "thesis.tex").write_text("all of it")
    refused(holmes("run", *local(f"run_dir={mine}")), "other files are there")
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]


def test_what_a_plan_has_fixed_cannot_be_overridden(holmes, tmp_path, monkeypatch):
    target = tmp_path / "plan.yaml"
    assert holmes("plan", *local(), "-o", str(target))[0] == 0
    for override in ("model=gpt_small", "batch.global_size=4", "plan.tp=2"):
        refused(holmes("submit", str(target), "--dry-run", "launcher=local", override), override, "fixed by the plan")
    assert holmes("submit", str(target), "--dry-run", "launcher=local", "plan.pp=2", "train.steps=3")[0] == 2


def test_layers_of_another_number_of_stages_are_refused(holmes, site):
    given = ("--model", "gpt_3_6b", "--site", str(site), "--micro-batch", "4", "--global-batch", "768")
    refused(holmes("predict", *given, "--pp", "3", "--dp", "16", "--layers-per-stage", "10,10"), "2 numbers", "PP 3")
    refused(holmes("plan", "model=gpt_3_6b", "--site", str(site), "plan.layers_per_stage=[10,10]"))


def test_an_unknown_option_of_a_group_is_told_the_known_ones(holmes, site):
    code, _, err = holmes("plan", "--site", str(site), "data=nope")
    assert code == 2 and err == "holmes: overrides: no data 'nope'; known are: indexed, synthetic\n"


def test_a_named_model_takes_another_vocabulary(holmes, site):
    def predicted(*more: str) -> float:
        code, out, _ = holmes("predict", "--site", str(site), "--model", "gpt_3_6b", "--pp", "2", "--dp", "32",
                              "--micro-batch", "4", "--global-batch", "768", "--json", *more)
        assert code == 0
        return json.loads(out)["step_time_s"]

    assert predicted("--vocab", "200000") > predicted()


@pytest.mark.parametrize("words", [["train.stps=2"], ["train.steps=0"],
                                   ["-m", "hydra/launcher=holmes_local", "train.steps=0"]])
def test_the_hydra_application_refuses_in_one_line(words, tmp_path):
    done = subprocess.run([sys.executable, "-m", "holmes_hpc.train", *words], cwd=tmp_path, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("holmes: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(site, form):
    """`holmes ... | head`: the pipe is closed before anything is written."""
    words = ["plan", "model=gpt_3_6b", "batch=paper_3_6b", "--site", str(site), *form]
    with subprocess.Popen([sys.executable, "-m", "holmes_hpc.cli", *words], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in said, said
