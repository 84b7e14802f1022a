"""Errors and warnings about a GPU, a driver or torch. The facts are made up; the tests need no such hardware."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from holmes_hpc.errors import ConfigError
from holmes_hpc.training.rank import compiler
from holmes_hpc.training.rank.cuda_check import (
    GIB,
    CudaFacts,
    can_compile,
    collect_facts,
    cuda_warnings,
    memory_problem,
    refuse_fp8,
    refuse_unusable,
)

GOOD = CudaFacts("13.0", 13000, 8, True)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (CudaFacts(None), "torch: this torch is built for CPUs; install a CUDA build"),
        (
            CudaFacts("13.0", 12040, 0),
            "torch: the NVIDIA driver supports CUDA up to 12.4, torch is built for 13.0; install a "
            "newer driver, or a torch built for CUDA 12",
        ),
        (CudaFacts("12.8", 0, 0), "no CUDA device and no NVIDIA driver; ask Slurm for GPUs (--gpus-per-node)"),
        (CudaFacts("12.8", 12080, 0), "no CUDA device; ask Slurm"),
        (CudaFacts("13.0", 13000, 8, False), "torch: this torch has no NCCL; install"),
        (
            CudaFacts("13.0", 13000, 8, True, "2.4", "undefined symbol: _ZN3c10"),
            "torch: Transformer Engine 2.4 cannot be imported: undefined symbol: _ZN3c10; "
            "install one built for this torch",
        ),
    ],
)
def test_each_problem_is_one_line(facts: CudaFacts, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_unusable(facts)
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        CudaFacts("12.8", 12020, 1),  # an older driver of the same major version is enough
        CudaFacts("12.8", 13000, 1),
        CudaFacts("13.0", 13000, 8, True, "2.10.0", None, ">=2.9.0a0,<2.12.0"),
    ],
)
def test_a_compatible_installation_gives_no_error_or_warning(facts: CudaFacts) -> None:
    refuse_unusable(facts)
    assert not list(cuda_warnings(facts))


def test_without_a_c_compiler_nothing_is_compiled_and_a_warning_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = cuda_warnings(replace(GOOD, has_compiler=False))
    assert "no C compiler or no Python.h" in line and "install gcc" in line

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(compiler, "_is_disabled", False)
    can_compile.cache_clear()
    with compiler.delayed():
        function = torch.compile(lambda x: x + 1)
    assert not can_compile() and function(1) == 2
    can_compile.cache_clear()


@pytest.mark.parametrize("version", ["1.13.0", "2.12.0"])
def test_an_unsupported_transformer_engine_gives_a_warning(version: str) -> None:
    (line,) = cuda_warnings(CudaFacts("13.0", 13000, 8, True, version, None, ">=2.9.0a0,<2.12.0"))
    assert line.startswith(f"Megatron-Core supports Transformer Engine >=2.9.0a0,<2.12.0, {version} is installed")


def test_memory_in_use_and_a_gpu_that_is_too_small_give_different_hints() -> None:
    assert memory_problem(78 * GIB, 80 * GIB, 70 * GIB, "g") is None
    assert memory_problem(64 * GIB, 80 * GIB, 70 * GIB, "g") is None  # predictions are accurate to 10%
    assert str(memory_problem(12 * GIB, 80 * GIB, 70 * GIB, "GPU 3 of node n1")) == (
        "GPU 3 of node n1: 12.0 of 80.0 GiB are free, the plan needs 70.0; another process holds its memory: end it "
        "(`nvidia-smi` shows it), or have Slurm drain the node"
    )
    assert "plan again for this kind of GPU" in str(memory_problem(39 * GIB, 40 * GIB, 70 * GIB, "g"))


@pytest.mark.nccl  # that environment has a CUDA build of torch
@pytest.mark.integration  # torch starts a process to find its libraries
def test_the_facts_of_this_machine_can_be_collected() -> None:
    facts = collect_facts()
    # the metadata of Megatron-Core names the versions of Transformer Engine; from 0.17 on it names none
    assert re.fullmatch(r"([<>=~!]\S+)?", facts.te_supported)
    assert facts.torch_cuda is not None or facts.devices == facts.driver_cuda == 0


@pytest.mark.parametrize(
    ("recipe", "on_gpu", "te", "capability", "pattern"),
    [
        ("delayed", True, "1.13.0", (8, 9), None),
        ("tensorwise", True, "2.2.0.dev0+5fdd7bb", (9, 0), None),
        ("mxfp8", True, "2.11.0", (10, 0), None),
        ("mxfp8", True, "2.11.0", (9, 0), "train.fp8=mxfp8: mxfp8 needs compute capability 10.0, below 12.0; this"),
        ("mxfp8", True, "2.11.0", (12, 0), "compute capability 10.0, below 12.0; this GPU has 12.0"),
        ("mxfp8", True, "2.0.0", (10, 0), "mxfp8 needs Transformer Engine 2.1, 2.0.0 is installed"),
        ("tensorwise", True, "2.1.0", (9, 0), "tensorwise needs Transformer Engine 2.2, 2.1.0 is installed"),
        ("delayed", True, "2.11.0", (8, 0), "compute capability 8.9; this GPU has 8.0"),
        ("delayed", True, None, (9, 0), "needs Transformer Engine, which is not installed"),
        ("delayed", False, "2.11.0", (0, 0), "fp8 needs a GPU"),
    ],
)
def test_fp8_without_its_gpu_or_transformer_engine_is_refused(
    recipe: str, on_gpu: bool, te: str | None, capability: tuple[int, int], pattern: str | None
) -> None:
    with contextlib.nullcontext() if pattern is None else pytest.raises(ConfigError, match=pattern):
        refuse_fp8(recipe, on_gpu, te, capability, {"model.hidden": 96})


@pytest.mark.parametrize(("recipe", "size", "block"), [("delayed", 24, 16), ("mxfp8", 48, 32)])
def test_sizes_that_are_no_multiple_of_the_fp8_block_are_refused(recipe: str, size: int, block: int) -> None:
    with pytest.raises(ConfigError, match=f"model.ffn on a rank is {size}, {recipe} needs a multiple of {block}"):
        refuse_fp8(recipe, True, "2.11.0", (10, 0), {"model.hidden": 64, "model.ffn on a rank": size})
