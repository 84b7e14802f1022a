"""`make gpu-proof`: its parts on a CPU, and its report of a part that hangs or fails."""

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
import gpu_proof_processes
import pipelines
import psutil
import pytest

SCRIPT = Path(gpu_proof.__file__)
ON_A_CPU = [name for name, part in gpu_proof.PARTS.items() if part.cpu]


@pytest.fixture(scope="module")
def proof_on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run all parts that need no GPU; return their folder and the output."""
    out = tmp_path_factory.mktemp("proof")
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out), "--parts", ",".join(ON_A_CPU)],
        capture_output=True,
        text=True,
    )
    return out, f"exit code {process.returncode}\n{process.stdout}{process.stderr}"


@pytest.mark.integration
@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_A_CPU)
def test_parts_run_on_a_cpu(name: str, proof_on_a_cpu: tuple[Path, str]) -> None:
    out, output = proof_on_a_cpu
    assert output.startswith("exit code 0\n"), output
    proof = json.loads((out / "proof.json").read_text())
    assert [r["ok"] for r in proof["parts"] if r["part"] == name] == [True]
    assert sorted(r["part"] for r in proof["parts"]) == sorted(ON_A_CPU)
    assert proof["says"] == "Run on a CPU: does not apply to GPUs."
    assert proof["says"] in (out / "proof.html").read_text()


def test_all_parts_end_within_nine_minutes() -> None:
    alone_s = sum(part.limit_s for part in gpu_proof.PARTS.values() if part.timed)
    assert alone_s + gpu_proof.AT_ONCE_S <= gpu_proof.TOTAL_S <= 530


@pytest.mark.integration
@pytest.mark.parametrize(
    ("script", "limit_s", "failure"),
    [
        ("import time; time.sleep(600)", 1, "time limit of 1 s reached"),
        ("1 / 0", 100, "exit code 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 100, "exit code -11"),
    ],
)
def test_a_part_that_hangs_or_dies_is_reported_and_ends(
    script: str, limit_s: float, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_proof_parts.py").write_text(script)
    monkeypatch.setattr(gpu_proof, "FOLDER", tmp_path)
    monkeypatch.setitem(gpu_proof.PARTS, "weights", gpu_proof.Part("nothing", limit_s))
    row = gpu_proof.run_part("weights", "cuda", tmp_path)
    assert not row["ok"] and row["wrong"][0] == failure


def end_limit_with(file: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a time limit of 100 s end as soon as `file` is written, however slow the machine is."""
    real, limit_s = getattr(subprocess.Popen, method), 100

    def wait_for_file(process: Any, *args: Any, timeout: float | None = None) -> Any:
        timeout_s = next(iter(args), timeout)
        if timeout_s != limit_s:
            return real(process, timeout=timeout_s)
        while not (file.exists() and file.read_text().endswith("}")):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("it", limit_s)

    monkeypatch.setattr(subprocess.Popen, method, wait_for_file)


@pytest.mark.integration
def test_a_part_at_its_limit_keeps_its_figures_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_proof_parts.py").write_text(
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        'Path(sys.argv[3]).write_text(\'{"wrong": ["one failure"], "child": %d}\' % child.pid)\n'
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_proof, "FOLDER", tmp_path)
    monkeypatch.setitem(gpu_proof.PARTS, "weights", gpu_proof.Part("nothing", 200))
    end_limit_with(tmp_path / "weights.json", "wait", monkeypatch)
    row = gpu_proof.run_part("weights", "cuda", tmp_path, remaining_s=100)
    assert row["wrong"] == ["time limit of 100 s reached", "one failure"]
    assert has_ended(row["figures"]["child"])


@pytest.mark.integration
def test_a_script_at_its_limit_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "child.json"
    text = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '600']).pid; "
        f"pathlib.Path({str(file)!r}).write_text('{{\"pid\": %d}}' % child); time.sleep(600)"
    )
    end_limit_with(file, "communicate", monkeypatch)
    assert gpu_proof_processes.run_script(text, 100, {}).returncode == 124
    assert has_ended(json.loads(file.read_text())["pid"])


def test_the_reference_loop_has_its_own_configuration() -> None:
    """A fault in a shared configuration would be in both and not show."""
    loop = inspect.getsource(gpu.run_minimal) + inspect.getsource(gpu.layer_spec)
    assert "TransformerConfig(" in loop and "training.model" not in loop and "transformer_config" not in loop


def has_ended(pid: int, patience_s: float = 10) -> bool:
    """Return whether the process ends, reaped or not. A kill takes a moment on a busy machine."""
    end = time.monotonic() + patience_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.integration
@pytest.mark.thorough
def test_pipelines_start_where_cuda_forbids_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the start method spawn, as on a machine with a GPU; the fixtures check that no process remains."""
    monkeypatch.setenv(pipelines.START_METHOD, "spawn")
    server = pipelines.Server()
    case = pipelines.Case(layers=[[1], [1]], micro_batches=[2], schedule="ahead", in_flight=[2, 1])
    ranks = server.call("play", [asdict(case)], 280, timeout_s=300)[0]
    assert all(len(rank["gradients"]) == 1 for rank in ranks)


def test_unknown_parts_and_a_missing_gpu_give_a_one_line_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in ((["--parts", "speeed"], "no part 'speeed'"), (["--parts", "speed"], "no CUDA device")):
        monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *arguments])
        monkeypatch.setattr(gpu_proof, "describe_machine", lambda: {})
        assert gpu_proof.main() == 2 and message in capsys.readouterr().err


def test_no_part_that_runs_without_a_gpu_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["gpu_proof.py", "--device", "cpu", "--parts", "tests,network", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_proof.main() == 0 and capsys.readouterr().out.count("needs a GPU") == 2
