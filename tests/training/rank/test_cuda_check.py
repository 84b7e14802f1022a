"""What is wrong with a GPU, a driver or torch. The facts are made up: nothing here has seen such hardware."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from holmes_hpc.errors import ConfigError
from holmes_hpc.training.rank import cpu
from holmes_hpc.training.rank.cuda_check import (
    GIB,
    CudaFacts,
    can_compile,
    gather,
    memory_problem,
    problem,
    refuse_fp8,
    remarks,
)

GOOD = CudaFacts("13.0", 13000, 8, True)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (CudaFacts(None), "torch: this torch is built for CPUs; install a CUDA build"),
        (
            CudaFacts("13.0", 12040, 0),
            "torch: the NVIDIA driver knows CUDA up to 12.4, torch is built for 13.0; install a "
            "newer driver, or a torch built for CUDA 12",
        ),
        (CudaFacts("12.8", 0, 0), "no CUDA device, nor an NVIDIA driver; ask Slurm for GPUs (--gpus-per-node)"),
        (CudaFacts("12.8", 12080, 0), "no CUDA device; ask Slurm"),
        (CudaFacts("13.0", 13000, 8, False), "torch: this torch has no NCCL; install"),
        (
            CudaFacts("13.0", 13000, 8, True, "2.4", "undefined symbol: _ZN3c10"),
            "torch: Transformer Engine 2.4 cannot be imported: undefined symbol: _ZN3c10; "
            "install one built for this torch",
        ),
    ],
)
def test_each_problem_is_one_line(facts: CudaFacts, says: str) -> None:
    assert says in str(problem(facts)) and "\n" not in str(problem(facts))


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        CudaFacts("12.8", 12020, 1),  # an older driver of the same major version serves
        CudaFacts("12.8", 13000, 1),
        CudaFacts("13.0", 13000, 8, True, "2.10.0", None, ">=2.9.0a0,<2.12.0"),
    ],
)
def test_what_fits_is_not_talked_about(facts: CudaFacts) -> None:
    assert problem(facts) is None and not list(remarks(facts))


def test_where_nothing_can_be_compiled_it_is_said_and_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = remarks(replace(GOOD, compiler=False))
    assert "no C compiler or no Python.h here" in line and "install gcc" in line

    def compiles(*_: object, **__: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch, "compile", compiles)
    monkeypatch.setattr(cpu, "_mode", None)
    can_compile.cache_clear()
    with cpu.without_compiler():
        function = torch.compile(lambda x: x + 1)
    assert not can_compile() and function(1) == 2
    can_compile.cache_clear()


@pytest.mark.parametrize("version", ["1.13.0", "2.12.0"])
def test_a_transformer_engine_of_another_time_is_said(version: str) -> None:
    (line,) = remarks(CudaFacts("13.0", 13000, 8, True, version, None, ">=2.9.0a0,<2.12.0"))
    assert line.startswith(f"Transformer Engine {version} is not of the versions that Megatron-Core was made for")


def test_memory_that_is_taken_is_told_from_memory_that_never_was() -> None:
    assert memory_problem(78 * GIB, 80 * GIB, 70 * GIB, "g") is None
    assert memory_problem(64 * GIB, 80 * GIB, 70 * GIB, "g") is None  # predictions are good to a tenth
    assert str(memory_problem(12 * GIB, 80 * GIB, 70 * GIB, "GPU 3 of node n1")) == (
        "GPU 3 of node n1: 12.0 of 80.0 GiB are free, the plan needs 70.0; another process holds its memory: end it "
        "(`nvidia-smi` shows it), or have Slurm drain the node"
    )
    assert "plan again for this kind of GPU" in str(memory_problem(39 * GIB, 40 * GIB, 70 * GIB, "g"))


@pytest.mark.nccl  # whose lane has a CUDA build of torch
@pytest.mark.integration  # which looks for its libraries by a process
def test_the_facts_of_this_machine_can_be_gathered() -> None:
    facts = gather()
    # Megatron-Core's own metadata says which Transformer Engine it is for, or, from 0.17 on, names no versions
    assert re.fullmatch(r"([<>=~!]\S+)?", facts.te_wanted)
    assert facts.wheel is not None or facts.devices == facts.driver == 0


@pytest.mark.parametrize(
    ("recipe", "on_gpu", "te", "capability", "says"),
    [
        ("delayed", True, "1.13.0", (8, 9), None),
        ("tensorwise", True, "2.2.0.dev0+5fdd7bb", (9, 0), None),
        ("mxfp8", True, "2.11.0", (10, 0), None),
        ("mxfp8", True, "2.11.0", (9, 0), "train.fp8=mxfp8: this GPU has compute capability 9.0, it needs 10.0"),
        ("mxfp8", True, "2.11.0", (12, 0), "compute capability 12.0, it needs 10.0, below 12.0"),
        ("mxfp8", True, "2.0.0", (10, 0), "it needs Transformer Engine 2.1, 2.0.0 is installed"),
        ("tensorwise", True, "2.1.0", (9, 0), "it needs Transformer Engine 2.2, 2.1.0 is installed"),
        ("delayed", True, "2.11.0", (8, 0), "compute capability 8.0, it needs 8.9"),
        ("delayed", True, None, (9, 0), "needs Transformer Engine, which is not installed"),
        ("delayed", False, "2.11.0", (0, 0), "fp8 needs a GPU"),
    ],
)
def test_fp8_where_it_cannot_be_had_is_refused(
    recipe: str, on_gpu: bool, te: str | None, capability: tuple[int, int], says: str | None
) -> None:
    with contextlib.nullcontext() if says is None else pytest.raises(ConfigError, match=says):
        refuse_fp8(recipe, on_gpu, te, capability, {"model.hidden": 96})


@pytest.mark.parametrize(("recipe", "size", "block"), [("delayed", 24, 16), ("mxfp8", 48, 32)])
def test_sizes_that_fp8_cannot_share_out_are_refused(recipe: str, size: int, block: int) -> None:
    with pytest.raises(ConfigError, match=f"model.ffn on a rank: {size}, where fp8 needs a multiple of {block}"):
        refuse_fp8(recipe, True, "2.11.0", (10, 0), {"model.hidden": 64, "model.ffn on a rank": size})
