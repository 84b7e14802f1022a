"""The driver's own list of this machine's GPUs. The folders are made here: no driver is on the machine that tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_hpc.fabric.local_gpus import local_gpus


@pytest.mark.parametrize(
    ("models", "kinds"),
    [
        (["NVIDIA H200"], ["h200"]),
        (["NVIDIA A100-SXM4-80GB"] * 2, ["a100-80gb"] * 2),
        (["NVIDIA H100 80GB HBM3"], ["h100"]),
        (["NVIDIA GeForce RTX 4090"], ["rtx-4090"]),
        (["Some GPU"], []),
        ([], []),
    ],
)
def test_kinds(models: list[str], kinds: list[str], tmp_path: Path) -> None:
    for number, model in enumerate(models):
        folder = tmp_path / f"0000:{number:02x}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 234\nGPU UUID: \t GPU-0\n")
    assert [gpu.name for gpu in local_gpus(tmp_path)] == kinds
