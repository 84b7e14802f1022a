"""Checks before a rank trains on CUDA: its GPU, driver, torch and Transformer Engine, and CUDA's hardware queues.

The rules are pure functions of :class:`CudaFacts`, which :func:`collect_facts` reads from this process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from holmes_hpc.errors import ConfigError, HolmesError, PlanError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.schema import refuse

GIB = 1 << 30
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES, MAX_QUEUES = 8, 32  # of CUDA
ANY = (1 << 30, 0)
# For each recipe: the least compute capability (8.9, Ada, multiplies in fp8; 10.0, Blackwell, scales in blocks), the
# first one that Transformer Engine does not support, the least version of Transformer Engine (Megatron-Core's
# fp8_utils.py), and the block size that all sizes must be multiples of.
FP8 = {
    "delayed": ((8, 9), ANY, "1.0", 16),
    "tensorwise": ((8, 9), ANY, "2.2", 16),
    "mxfp8": ((10, 0), (12, 0), "2.1", 32),
}
MIN_FREE = 0.9  # fraction of the predicted memory that must be free; the prediction is that accurate


@dataclass(frozen=True)
class CudaFacts:
    """The CUDA installation of this process.

    `wheel`: the CUDA version that torch was built for (None: a CPU build); `driver`: the newest CUDA version that the
    driver supports (12040 for 12.4; 0: no driver); `devices`: number of usable GPUs; `nccl`: torch has NCCL; `te`:
    Transformer Engine's version; `te_error`: why its import fails; `te_supported`: the versions that Megatron-Core
    supports (``>=2.9,<2.12``); `compiler`: Triton can build the launchers of its kernels.
    """

    wheel: str | None
    driver: int = 0
    devices: int = 0
    nccl: bool = True
    te: str | None = None
    te_error: str | None = None
    te_supported: str = ""
    compiler: bool = True


def collect_facts() -> CudaFacts:
    """Return the facts of this process. Call it only if training shall use CUDA: it queries the driver.
    It creates no CUDA context."""
    wheel = torch.version.cuda
    te, error = transformer_engine()
    return CudaFacts(
        wheel,
        driver=_driver() if wheel else 0,
        devices=torch.cuda.device_count() if wheel else 0,
        nccl=dist.is_nccl_available(),
        te=te,
        te_error=error,
        te_supported=_supported_te(),
        compiler=can_compile(),
    )


def _driver() -> int:
    """Return the newest CUDA version that the driver supports. Torch no longer offers this query."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no driver
        return 0
    return 0 if failed else version.value


@cache
def can_compile() -> bool:
    """Return whether Triton can build the launchers of its kernels, which needs a C compiler and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be used. Call it only for training on CUDA, because it imports it."""
    version, error = transformer_engine()
    return version is not None and error is None


@cache
def transformer_engine() -> tuple[str | None, str | None]:
    """Return the version of Transformer Engine (None: not installed), and why its import fails (None: it works)."""
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AttributeError) as e:  # built for another torch, CUDA or C++
        return version, " ".join(str(e).split())[:200]
    return version, None


def _supported_te() -> str:
    """Return the versions of Transformer Engine that Megatron-Core's metadata requires."""
    for line in importlib.metadata.requires("megatron-core") or []:
        match = re.match(r"transformer[-_]engine(?:\[[^]]*\])?\s*([<>=!~][^;]*)", line)
        if match:
            return match[1].strip()
    return ""


def problem(facts: CudaFacts) -> HolmesError | None:
    """Return the most severe error that prevents training on CUDA, or None."""
    major, minor, built_for = facts.driver // 1000, facts.driver % 1000 // 10, int((facts.wheel or "0").split(".")[0])
    cases = (
        (
            facts.wheel is None,
            "torch",
            "this torch is built for CPUs",
            "install a CUDA build of torch, or use train.device=cpu",
        ),
        (
            facts.driver and major < built_for,
            "torch",
            f"the NVIDIA driver supports CUDA up to {major}.{minor}, torch is built for {facts.wheel}",
            f"install a newer driver, or a torch built for CUDA {major}",
        ),
        (
            not facts.devices,
            "train.device",
            "no CUDA device" if facts.driver else "no CUDA device and no NVIDIA driver",
            "ask Slurm for GPUs (--gpus-per-node), see `nvidia-smi`, or use train.device=cpu",
        ),
        (
            not facts.nccl,
            "torch",
            "this torch has no NCCL",
            "install a build of torch with NCCL (PyPI's for Linux has it)",
        ),
        (
            facts.te_error,
            "torch",
            f"Transformer Engine {facts.te} cannot be imported: {facts.te_error}",
            "install one built for this torch, or uninstall it: training works without it",
        ),
    )
    return next((ConfigError(text, where=where, hint=hint) for is_wrong, where, text, hint in cases if is_wrong), None)


def cuda_warnings(facts: CudaFacts) -> Iterator[str]:
    """Yield warnings about a missing compiler or an unsupported Transformer Engine."""
    if facts.wheel and not facts.compiler:
        yield (
            "no C compiler or no Python.h, so torch.compile cannot build kernels: bias, dropout and"
            " activation stay unfused; install gcc and Python's headers (Debian: python3-dev)"
        )
    if facts.te and facts.te_supported and not facts.te_error and not _is_in(facts.te, facts.te_supported):
        yield (
            f"Megatron-Core does not support Transformer Engine {facts.te} ({facts.te_supported}): "
            "if a step fails in it, install a supported version"
        )


def refuse_fp8(
    recipe: str, on_gpu: bool, te: str | None, capability: tuple[int, int], sizes: Mapping[str, int]
) -> None:
    """Raise ConfigError if this rank cannot train with the fp8 `recipe`. `te`: Transformer Engine's version;
    `capability`: the GPU's compute capability; `sizes`: of this rank's matrix products, multiples of the block size."""
    needed, below, version, block = FP8[recipe]
    hint = "leave train.fp8 out"
    has, needs, limit = (".".join(map(str, c)) for c in (capability, needed, below))
    refuse(
        f"train.fp8={recipe}",
        (not on_gpu, "fp8 needs a GPU", hint),
        (
            te is None,
            "fp8 needs Transformer Engine, which is not installed",
            f"pip install transformer-engine[pytorch], or {hint}",
        ),
        (not _is_in(te or "0", f">={version}.dev0"), f"it needs Transformer Engine {version}, {te} is installed", hint),
        (
            not needed <= capability < below,
            f"this GPU has compute capability {has}, it needs {needs}" + (f", below {limit}" if below < ANY else ""),
            hint,
        ),
        *(
            (size % block != 0, f"{name}: {size}, where fp8 needs a multiple of {block}", hint)
            for name, size in sizes.items()
        ),
    )


def _is_in(version: str, supported: str) -> bool:
    """Return whether a version is in a set that packaging understands (``>=2.9,<2.12``)."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(supported, prereleases=True).contains(version)


def memory_problem(free: int, total: int, needed: float, where: str) -> PlanError | None:
    """Return an error if a GPU has too little free memory. All sizes in bytes; `needed`: predicted by the plan."""
    if free >= MIN_FREE * needed:
        return None
    too_small = "plan again for this kind of GPU (`holmes nodes` shows it)"
    in_use = "another process holds its memory: end it (`nvidia-smi` shows it), or have Slurm drain the node"
    return PlanError(
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, the plan needs {needed / GIB:.1f}",
        where=where,
        hint=too_small if total < MIN_FREE * needed else in_use,
    )


def use_cuda(device: str, plan: Plan) -> bool:
    """Return whether to train on CUDA. ConfigError if ``train.device=cuda`` and there is no CUDA device.

    `device`: ``train.device``; ``auto`` means the CPU if a fabric of the plan has CPUs, because all ranks must share
    one kind of process group; otherwise CUDA if there is a device. Training asks torch for a device only here.
    """
    if device == "cpu" or (device == "auto" and any(plan.site.fabric(c.fabric).gpu.is_cpu for c in plan.components)):
        return False
    is_available = torch.cuda.is_available()
    if device == "cuda" and not is_available:
        raise problem(collect_facts()) or ConfigError(
            "no CUDA device", where="train.device", hint="use train.device=cpu or auto"
        )
    return is_available


def stream_count(plan: Plan, rank: int) -> int:
    """Return the number of CUDA streams of `rank`.

    One computes. Each direction of an edge has one per communicator; tensor and data parallelism have one each.
    Several optimizer instances add two. Three serve the gradient norm, the tied embedding and the world group.
    """
    p, stage = plan.parallel, plan.parallel.coordinates(rank)[0]
    edges = [edge for edge in plan.transports() if edge.kind == "edge" and rank in edge.ranks]
    ring = 2 if p.pp == 2 and p.virtual_stages > 1 else 1  # the last stage's edge to the first has the same two ranks
    return (
        1
        + ring * sum(2 * (plan.edge_connections if e.transport.kind == "tcp" else 1) for e in edges)
        + (p.tp_of(stage) > 1)
        + (p.stages[stage].dp > 1)
        + (2 if p.optimizer_instances > 1 else 0)
        + 3
    )


def set_queue_count(plan: Plan, rank: int, environ: MutableMapping[str, str]) -> str | None:
    """Set the number of CUDA's hardware queues in `environ`, one per stream of `rank`. Call it before CUDA starts.

    Streams that share a queue run in launch order, so a waiting transfer would block unrelated work. A different
    value in `environ` is kept; the result is then a warning.
    """
    needed = str(min(MAX_QUEUES, max(DEFAULT_QUEUES, stream_count(plan, rank))))
    queues = environ.setdefault(CONNECTIONS, needed)
    if queues == needed:
        return None
    return f"{CONNECTIONS}={queues} from the environment is kept; the streams of rank {rank} need {needed}"
