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
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.schema import refuse

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
    """Return the facts of this process. Asks the driver, so only where training shall use CUDA; makes no context."""
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
    """Return the newest CUDA that the driver knows, asked of the driver itself: torch does not ask it any more."""
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
    """Return whether Transformer Engine can be used. Imports it: ask where training is on CUDA only."""
    version, error = transformer_engine()
    return version is not None and error is None


@cache
def transformer_engine() -> tuple[str | None, str | None]:
    """Return the version of Transformer Engine, and why it cannot be imported; None for what there is not."""
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
    """Return what Megatron-Core's own metadata asks of Transformer Engine."""
    for line in importlib.metadata.requires("megatron-core") or []:
        match = re.match(r"transformer[-_]engine(?:\[[^]]*\])?\s*([<>=!~][^;]*)", line)
        if match:
            return match[1].strip()
    return ""


def problem(facts: CudaFacts) -> HolmesError | None:
    """Return the worst that forbids to train on CUDA here."""
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
            f"the NVIDIA driver knows CUDA up to {major}.{minor}, torch is built for {facts.wheel}",
            f"install a newer driver, or a torch built for CUDA {major}",
        ),
        (
            not facts.devices,
            "train.device",
            "no CUDA device" if facts.driver else "no CUDA device, nor an NVIDIA driver",
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
            "install one built for this torch, or uninstall it: training works without",
        ),
    )
    return next((ConfigError(what, where=where, hint=hint) for is_wrong, where, what, hint in cases if is_wrong), None)


def remarks(facts: CudaFacts) -> Iterator[str]:
    """Yield lines for the log: what may be wrong."""
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


def refuse_fp8(
    recipe: str, on_gpu: bool, te: str | None, capability: tuple[int, int], sizes: Mapping[str, int]
) -> None:
    """Raise ConfigError where ``train.fp8`` cannot be had. `te`: Transformer Engine's version; `capability`: CUDA's
    compute capability of the GPU; `sizes` of this rank's products, which have to be whole blocks."""
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
        (not _is_of(te or "0", f">={version}.dev0"), f"it needs Transformer Engine {version}, {te} is installed", hint),
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


def _is_of(version: str, wanted: str) -> bool:
    """Return whether a version is one of those `wanted`, in packaging's words (``>=2.9,<2.12``)."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted, prereleases=True).contains(version)


def memory_problem(free: int, total: int, needed: float, where: str) -> PlanError | None:
    """Return the error where a GPU's memory is taken, or never was enough: bytes free, it has, and the plan
    predicts."""
    if free >= TAKEN * needed:
        return None
    never_enough = "plan again for this kind of GPU (`holmes nodes` shows which it is)"
    taken = "another process holds its memory: end it (`nvidia-smi` shows it), or have Slurm drain the node"
    return PlanError(
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, the plan needs {needed / GIB:.1f}",
        where=where,
        hint=never_enough if total < TAKEN * needed else taken,
    )


def wanted(device: str, plan: Plan) -> bool:
    """Whether to train on CUDA. `device`: ``train.device``; ``auto`` is the CPU where a fabric of the plan is of CPUs,
    for all ranks meet in groups of one kind, else CUDA where there is a device. ConfigError for ``cuda`` without one.
    Nothing else in training asks torch whether there is one."""
    if device == "cpu" or (device == "auto" and any(plan.site.fabric(c.fabric).gpu.is_cpu for c in plan.components)):
        return False
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise problem(gather()) or ConfigError(
            "no CUDA device", where="train.device", hint="use train.device=cpu or auto"
        )
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
        + (p.stages[stage].dp > 1)
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
