"""`make gpu-proof` itself: what of it runs without a GPU, and what becomes of a part that hangs or fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_proof
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
    assert sum(part.limit_s for part in gpu_proof.PARTS.values()) <= 540


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


def test_unknown_parts_and_no_gpu_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, says in ((["--parts", "speeed"], "no part 'speeed'"), (["--parts", "speed"], "no CUDA device")):
        monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *words])
        monkeypatch.setattr(gpu_proof, "machine", lambda: {})
        assert gpu_proof.main() == 2 and says in capsys.readouterr().err
