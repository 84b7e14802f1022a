"""Whether a rank trains on CUDA, what CUDA is told before it starts, and what is wrong with its GPU, driver or torch.

The rules are pure; one small function asks torch for the facts.
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
from holmes_hpc.planning.spec.plan import Plan

GIB = 1 << 30
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
FEWEST, MOST = 8, 32  # CUDA's default, and all that it has
ANY = (1 << 30, 0)
# Of each recipe: the compute capability it needs (8.9, Ada, multiplies in fp8; 10.0, Blackwell, scales it block by
# block) and one for which Transformer Engine does not have it, the least version of Transformer Engine (Megatron-Core's
# fp8_utils.py), and what sizes have to be multiples of.
FP8 = {
    "delayed": ((8, 9), ANY, "1.0", 16),
    "tensorwise": ((8, 9), ANY, "2.2", 16),
    "mxfp8": ((10, 0), (12, 0), "2.1", 32),
}
TAKEN = 0.9  # of what the plan predicts must be free; its predictions are that good


@dataclass(frozen=True)
class CudaFacts:
    """What torch says of CUDA here. `wheel`: the CUDA version that torch was built for (None: a CPU build); `driver`:
    the newest CUDA that the driver knows (12040 for 12.4; 0: there is none); `devices`: GPUs that can be used; `nccl`:
    whether torch has NCCL; `te`: Transformer Engine's version, `te_error`: why it cannot be imported, `te_wanted`: the
    versions that Megatron-Core asks for (``>=2.9,<2.12``). `compiler`: whether Triton can build its kernels' start.
    """

    wheel: str | None
    driver: int = 0
    devices: int = 0
    nccl: bool = True
    te: str | None = None
    te_error: str | None = None
    te_wanted: str = ""
    compiler: bool = True


def gather() -> CudaFacts:
    """The facts of this process. Asks the driver, so only where training shall use CUDA; makes no context."""
    wheel = torch.version.cuda
    te, error = transformer_engine()
    return CudaFacts(
        wheel,
        driver=_driver() if wheel else 0,
        devices=torch.cuda.device_count() if wheel else 0,
        nccl=dist.is_nccl_available(),
        te=te,
        te_error=error,
        te_wanted=_wanted_te(),
        compiler=can_compile(),
    )


def _driver() -> int:
    """The newest CUDA that the driver knows, asked of the driver itself: torch has no such question any more."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no driver
        return 0
    return 0 if failed else version.value


@cache
def can_compile() -> bool:
    """Whether there is what Triton builds the start of its kernels with, when ``torch.compile`` uses it first: a C
    compiler, and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be used. Imports it: ask where training is on CUDA only."""
    version, error = transformer_engine()
    return version is not None and error is None


@cache
def transformer_engine() -> tuple[str | None, str | None]:
    """Its version, and why it cannot be imported; none of what there is not."""
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AttributeError) as e:  # built for another torch, CUDA or C++
        return version, " ".join(str(e).split())[:200]
    return version, None


def _wanted_te() -> str:
    """What Megatron-Core's own metadata asks of Transformer Engine."""
    for line in importlib.metadata.requires("megatron-core") or []:
        match = re.match(r"transformer[-_]engine(?:\[[^]]*\])?\s*([<>=!~][^;]*)", line)
        if match:
            return match[1].strip()
    return ""


def problems(facts: CudaFacts) -> Iterator[HolmesError]:
    """What forbids to train on CUDA here, worst first; one line each."""
    if facts.wheel is None:
        yield ConfigError(
            "this torch is built for CPUs", where="torch", hint="install a CUDA build of torch, or use train.device=cpu"
        )
        return
    needed = int(facts.wheel.split(".")[0])
    if facts.driver and facts.driver // 1000 < needed:
        has = f"{facts.driver // 1000}.{facts.driver % 1000 // 10}"
        yield ConfigError(
            f"the NVIDIA driver knows CUDA up to {has}, torch is built for {facts.wheel}",
            where="torch",
            hint=f"install a newer driver, or a torch built for CUDA {facts.driver // 1000}",
        )
        return
    if not facts.devices:
        what = "no CUDA device" if facts.driver else "no CUDA device, nor an NVIDIA driver"
        yield ConfigError(
            what,
            where="train.device",
            hint="ask Slurm for GPUs (--gpus-per-node), see `nvidia-smi`, or use train.device=cpu",
        )
    if not facts.nccl:
        yield ConfigError(
            "this torch has no NCCL", where="torch", hint="install a build of torch with NCCL (PyPI's for Linux has it)"
        )
    if facts.te_error:
        yield ConfigError(
            f"Transformer Engine {facts.te} cannot be imported: {facts.te_error}",
            where="torch",
            hint="install one built for this torch, or uninstall it: training works without",
        )


def remarks(facts: CudaFacts) -> Iterator[str]:
    """What may be wrong: lines for the log."""
    if facts.wheel and not facts.compiler:
        yield (
            "no C compiler or no Python.h here, without which torch.compile makes no kernels: bias, dropout and"
            " activation stay unfused; install gcc and Python's headers (Debian: python3-dev)"
        )
    if facts.te and facts.te_wanted and not facts.te_error and not _is_of(facts.te, facts.te_wanted):
        yield (
            f"Transformer Engine {facts.te} is not of the versions that Megatron-Core was made for "
            f"({facts.te_wanted}): if a step fails in it, install one of those"
        )


def fp8_problem(
    recipe: str, on_gpu: bool, te: str | None, capability: tuple[int, int], sizes: Mapping[str, int]
) -> ConfigError | None:
    """Whether ``train.fp8`` cannot be had. `te`: Transformer Engine's version; `capability`: CUDA's compute capability
    of the GPU; `sizes` of this rank's products, which have to be whole blocks."""
    needed, below, version, block = FP8[recipe]
    where, hint = f"train.fp8={recipe}", "leave train.fp8 out"
    if not on_gpu:
        return ConfigError("fp8 needs a GPU", where=where, hint=hint)
    if te is None:
        return ConfigError(
            "fp8 needs Transformer Engine, which is not installed",
            where=where,
            hint="pip install transformer-engine[pytorch], or " + hint,
        )
    if not _is_of(te, f">={version}.dev0"):
        return ConfigError(f"it needs Transformer Engine {version}, {te} is installed", where=where, hint=hint)
    if not needed <= capability < below:
        wanted = f"it needs {'.'.join(map(str, needed))}" + (f", below {below[0]}.{below[1]}" if below < ANY else "")
        return ConfigError(
            f"this GPU has compute capability {'.'.join(map(str, capability))}, {wanted}", where=where, hint=hint
        )
    for name, size in sizes.items():
        if size % block:
            return ConfigError(f"{name}: {size}, where fp8 needs a multiple of {block}", where=where, hint=hint)
    return None


def _is_of(version: str, wanted: str) -> bool:
    """Whether a version is one of those `wanted`, in packaging's words (``>=2.9,<2.12``)."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted, prereleases=True).contains(version)


def memory_problem(free: int, total: int, needed: float, where: str) -> PlanError | None:
    """Whether a GPU's memory is taken, or never was enough: bytes free, bytes it has, bytes the plan predicts."""
    if free >= TAKEN * needed:
        return None
    said = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, the plan needs {needed / GIB:.1f}"
    if total < TAKEN * needed:
        return PlanError(said, where=where, hint="plan again for this kind of GPU (`holmes nodes` shows which it is)")
    return PlanError(
        said,
        where=where,
        hint="another process holds its memory: end it (`nvidia-smi` shows it), or have Slurm drain the node",
    )


def wanted(device: str, plan: Plan) -> bool:
    """Whether to train on CUDA. `device`: ``train.device``; ``auto`` is the CPU where a fabric of the plan is of CPUs,
    for all ranks meet in groups of one kind, else CUDA where there is a device. ConfigError for ``cuda`` without one.
    Nothing else in training asks torch whether there is one."""
    if device == "cpu" or (device == "auto" and any(plan.site.fabric(c.fabric).gpu.is_cpu for c in plan.components)):
        return False
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        no_device = ConfigError("no CUDA device", where="train.device", hint="use train.device=cpu or auto")
        raise next(problems(gather()), no_device)
    return found


def streams(plan: Plan, rank: int) -> int:
    """CUDA streams of `rank`: computing; one for each communicator of each direction of its edges; tensor parallel;
    data parallel, and with several optimizer instances Megatron-Core's own and that between the instances; and those
    of what comes after the passes: the gradient norm, the tied embedding, all ranks."""
    p, stage = plan.parallel, plan.parallel.coordinates(rank)[0]
    edges = [edge for edge in plan.transports() if edge.kind == "edge" and rank in edge.ranks]
    ring = 2 if p.pp == 2 and p.virtual_stages > 1 else 1  # the last stage's edge to the first: the same two ranks
    return (
        1
        + ring * sum(2 * (plan.edge_connections if e.transport.kind == "tcp" else 1) for e in edges)
        + (p.tp_of(stage) > 1)
        + (p.dp_of(stage) > 1)
        + (2 if p.optimizer_instances > 1 else 0)
        + 3
    )


def connect_queues(plan: Plan, rank: int, environ: MutableMapping[str, str]) -> str | None:
    """Give every stream of `rank` a hardware queue of its own: two that share one run in the order of their launches,
    so that a transfer that waits would hold up what has nothing to do with it. Where `environ` has another number, it
    stays, and what is to be said about it comes back. CUDA reads it when it makes its context: call this before."""
    needed = min(MOST, max(FEWEST, streams(plan, rank)))
    given = environ.setdefault(CONNECTIONS, str(needed))
    if given == str(needed):
        return None
    return f"{CONNECTIONS} is {given} in the environment and stays so; the streams of rank {rank} need {needed}"
