"""`make gpu-proof` itself: what of it runs without a GPU, and what becomes of a part that hangs or fails."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu
import gpu_proof
import gpu_proof_parts
import pipelines
import psutil
import pytest

SCRIPT = Path(gpu_proof.__file__)


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name, part in gpu_proof.PARTS.items() if part.cpu])
def test_what_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path), "--parts", name],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert [(r["part"], r["ok"]) for r in proof["parts"]] == [(name, True)]
    assert proof["says"] == "On a CPU: says nothing about GPUs."
    assert proof["says"] in (tmp_path / "proof.html").read_text()


def test_all_parts_end_within_nine_minutes() -> None:
    assert sum(part.limit_s for part in gpu_proof.PARTS.values()) <= gpu_proof.TOTAL_S <= 530


@pytest.mark.integration
@pytest.mark.parametrize(
    ("does", "limit_s", "wrong"),
    [
        ("import time; time.sleep(600)", 1, "ran past its limit of 1 s"),
        ("1 / 0", 100, "ended with exit code 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 100, "ended with exit code -11"),
    ],
)
def test_a_part_that_hangs_or_dies_is_said_and_ends(
    does: str, limit_s: float, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_proof_parts.py").write_text(does)
    monkeypatch.setattr(gpu_proof, "HERE", tmp_path)
    monkeypatch.setitem(gpu_proof.PARTS, "weights", gpu_proof.Part("nothing", limit_s))
    row = gpu_proof.run_part("weights", "cuda", tmp_path)
    assert not row["ok"] and row["wrong"][0] == wrong


def limit_comes_with(file: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a time limit end as soon as `file` exists, however slow the machine is."""
    real, limit_s = getattr(subprocess.Popen, method), 100

    def until_there(process: Any, *args: Any, timeout: float | None = None) -> Any:
        said = next(iter(args), timeout)
        if said != limit_s:
            return real(process, timeout=said)
        while not (file.exists() and file.read_text().endswith("}")):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("it", limit_s)

    monkeypatch.setattr(subprocess.Popen, method, until_there)


@pytest.mark.integration
def test_a_part_at_its_limit_shows_what_it_had_found_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_proof_parts.py").write_text(
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        'Path(sys.argv[3]).write_text(\'{"wrong": ["one thing"], "child": %d}\' % child.pid)\n'
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_proof, "HERE", tmp_path)
    monkeypatch.setitem(gpu_proof.PARTS, "weights", gpu_proof.Part("nothing", 200))
    limit_comes_with(tmp_path / "weights.json", "wait", monkeypatch)
    row = gpu_proof.run_part("weights", "cuda", tmp_path, left_s=100)
    assert row["wrong"] == ["ran past its limit of 100 s", "one thing"]
    assert gone(row["figures"]["child"])


@pytest.mark.integration
def test_a_script_past_its_limit_ends_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "child.json"
    text = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '600']).pid; "
        f"pathlib.Path({str(file)!r}).write_text('{{\"pid\": %d}}' % child); time.sleep(600)"
    )
    limit_comes_with(file, "communicate", monkeypatch)
    assert gpu_proof_parts._python(text, 100, {}).returncode == 124
    assert gone(json.loads(file.read_text())["pid"])


def test_what_speed_is_held_against_has_a_configuration_of_its_own() -> None:
    """Only sizes are shared with the engine: a fault in its configuration would be in both."""
    loop = inspect.getsource(gpu.minimal) + inspect.getsource(gpu.layers)
    assert "TransformerConfig(" in loop and "training.model" not in loop and "transformer_config" not in loop


def gone(pid: int) -> bool:
    """Return whether a process has ended, even if nobody has waited for it."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.integration
def test_pipelines_start_where_cuda_forbids_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned, as on a machine with a GPU: that leaves no process behind either, which every test is watched for."""
    monkeypatch.setenv(pipelines.START_METHOD, "spawn")
    server = pipelines.Server()
    case = pipelines.Case(layers=[[1], [1]], micro_batches=[2], schedule="ahead", in_flight=[2, 1])
    ranks = server.call("play", [asdict(case)], 280, timeout_s=300)[0]
    assert all(len(rank["gradients"]) == 1 for rank in ranks)


def test_unknown_parts_and_no_gpu_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, says in ((["--parts", "speeed"], "no part 'speeed'"), (["--parts", "speed"], "no CUDA device")):
        monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *words])
        monkeypatch.setattr(gpu_proof, "machine", lambda: {})
        assert gpu_proof.main() == 2 and says in capsys.readouterr().err
