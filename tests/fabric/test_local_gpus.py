"""The driver's own list of this machine's GPUs. The folders are made here: no driver is on the machine that tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_hpc.cli import submission_steps
from holmes_hpc.config.composition import load
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.local_gpus import has_gpu, local_gpus, nvidia_smi
from holmes_hpc.planning import request


@pytest.mark.parametrize(
    ("models", "kinds"),
    [
        (["NVIDIA H200"], ["h200"]),
        (["NVIDIA A100-SXM4-80GB"] * 2, ["a100-80gb"] * 2),
        (["NVIDIA H100 80GB HBM3"], ["h100"]),
        (["NVIDIA GeForce RTX 4090"], ["rtx-4090"]),
        (["NVIDIA L4"], ["l4"]),
        (["Tesla T4"], ["t4"]),
        ([], []),
    ],
)
def test_kinds(models: list[str], kinds: list[str], tmp_path: Path) -> None:
    drivers_folder(tmp_path, models)
    assert [gpu.name for gpu in local_gpus(tmp_path)] == kinds


def test_a_kind_without_figures_is_one_line_where_cuda_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers_folder(tmp_path, ["Some GPU"])
    with pytest.raises(ConfigError, match="the GPU 'Some GPU' is not a known kind"):
        local_gpus(tmp_path)
    monkeypatch.setattr(request, "local_gpus", lambda: local_gpus(tmp_path))
    assert request.local_site(1, "auto").pools[0].gpu.is_cpu
    with pytest.raises(ConfigError, match="site file"):
        request.local_site(1, "cuda")


def test_nvidia_smi_is_asked_where_the_drivers_folder_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\nNVIDIA X, [N/A]\n"
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("holmes_hpc.fabric.local_gpus.partial_outputs", lambda *_, **__: [(lines, "")])
    assert [gpu.name for gpu in local_gpus(tmp_path)] == ["h100", "h100"]
    assert nvidia_smi() == [("NVIDIA H100 80GB HBM3", 79.6)] * 2


def drivers_folder(tmp_path: Path, models: list[str]) -> None:
    for number, model in enumerate(models):
        folder = tmp_path / f"0000:{number:02x}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 234\nGPU UUID: \t GPU-0\n")


def test_local_ranks_on_cuda_are_refused_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path)
    monkeypatch.setattr(submission_steps, "has_gpu", lambda: False)
    config = load(["launcher=local", "train.device=cuda"])
    with pytest.raises(ConfigError, match=r"train\.device: this machine has no GPU; leave out launcher=local"):
        submission_steps.check_inputs(config)
