"""Checks before a rank trains on CUDA: its GPU, driver, torch and Transformer Engine, and CUDA's hardware queues.

The rules are pure functions of :class:`CudaFacts`, which :func:`collect_facts` reads from this process.
"""

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

from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.planning.plan.plan import Plan

GIB = 1 << 30
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES, MAX_QUEUES = 8, 32  # hardware queues per GPU: CUDA's default and its limit
NO_LIMIT = (1 << 30, 0)  # above all compute capabilities
# Recipe -> (lowest compute capability, lowest one that Transformer Engine no longer supports, lowest version of
# Transformer Engine by Megatron-Core's fp8_utils.py, block size). Ada (8.9) multiplies in fp8, and Blackwell (10.0)
# scales in blocks. Every dimension of a matrix multiplication must be a multiple of the block size.
FP8 = {
    "delayed": ((8, 9), NO_LIMIT, "1.0", 16),
    "tensorwise": ((8, 9), NO_LIMIT, "2.2", 16),
    "mxfp8": ((10, 0), (12, 0), "2.1", 32),
}
MIN_FREE = 0.9  # share of the predicted memory that must be free; the prediction may be 10% too high


@dataclass(frozen=True)
class CudaFacts:
    """The CUDA installation of this process.

    `torch_cuda`: the CUDA version that torch was built for (None: a CPU build); `driver_cuda`: the newest CUDA version
    that the driver supports (12040 for 12.4; 0: no driver); `devices`: the number of usable GPUs; `has_nccl`: torch
    has NCCL; `te_version`: the version of Transformer Engine (None: not installed); `te_error`: why its import fails
    (None: it works); `te_supported`: the versions of it that Megatron-Core supports (``>=2.9,<2.12``); `has_compiler`:
    Triton can build the launchers of its kernels.
    """

    torch_cuda: str | None
    driver_cuda: int = 0
    devices: int = 0
    has_nccl: bool = True
    te_version: str | None = None
    te_error: str | None = None
    te_supported: str = ""
    has_compiler: bool = True


def collect_facts() -> CudaFacts:
    """Return the facts of this process. Call it only for training on CUDA, because it queries the driver."""
    torch_cuda = torch.version.cuda
    te_version, te_error = transformer_engine()
    return CudaFacts(
        torch_cuda,
        driver_cuda=_driver_cuda() if torch_cuda else 0,
        devices=torch.cuda.device_count() if torch_cuda else 0,
        has_nccl=dist.is_nccl_available(),
        te_version=te_version,
        te_error=te_error,
        te_supported=_supported_te(),
        has_compiler=can_compile(),
    )


def _driver_cuda() -> int:
    """Return the newest CUDA version that the driver supports (12040 for 12.4), 0 without a driver."""
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
    """Return whether Transformer Engine can be used. Call this only for training on CUDA: it imports the package."""
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
    """Return the versions of Transformer Engine that Megatron-Core's metadata requires; "" if it names none."""
    pattern = re.compile(r"transformer[-_]engine(?:\[[^]]*\])?\s*([<>=!~][^;]*)")
    matches = map(pattern.match, importlib.metadata.requires("megatron-core") or [])
    return next((match[1].strip() for match in matches if match), "")


def refuse_unusable(facts: CudaFacts) -> None:
    """Raise ConfigError for the most severe problem that prevents training on CUDA."""
    major, minor = facts.driver_cuda // 1000, facts.driver_cuda % 1000 // 10
    build_hint = "install a CUDA build of torch, or use train.device=cpu"
    is_old_driver = facts.driver_cuda and major < int((facts.torch_cuda or "0").split(".")[0])
    old_driver = f"the NVIDIA driver supports CUDA up to {major}.{minor}, torch is built for {facts.torch_cuda}"
    driver_hint = f"install a newer driver, or a torch built for CUDA {major}"
    no_device = "no CUDA device" if facts.driver_cuda else "no CUDA device and no NVIDIA driver"
    device_hint = "ask Slurm for GPUs (--gpus-per-node), see `nvidia-smi`, or use train.device=cpu"
    te_problem = f"Transformer Engine {facts.te_version} cannot be imported: {facts.te_error}"
    te_hint = "install one built for this torch, or uninstall it: training works without it"
    ConfigError.refuse(
        "torch",
        (facts.torch_cuda is None, "this torch is built for CPUs", build_hint),
        (is_old_driver, old_driver, driver_hint),
        (not facts.devices, no_device, device_hint, "train.device"),
        (not facts.has_nccl, "this torch has no NCCL", "install a build of torch with NCCL (PyPI's for Linux has it)"),
        (facts.te_error, te_problem, te_hint),
    )


def cuda_warnings(facts: CudaFacts) -> Iterator[str]:
    """Yield warnings about a missing compiler or an unsupported Transformer Engine."""
    if facts.torch_cuda and not facts.has_compiler:
        yield (
            "no C compiler or no Python.h, so torch.compile cannot build kernels: bias, dropout and"
            " activation stay unfused; install gcc and Python's headers (Debian: python3-dev)"
        )
    te_version, supported = facts.te_version, facts.te_supported
    if te_version and supported and not facts.te_error and not _is_in(te_version, supported):
        yield (
            f"Megatron-Core supports Transformer Engine {supported}, {te_version} is installed: "
            "if a step fails in it, install a supported version"
        )


def refuse_fp8(
    recipe: str, on_gpu: bool, te_version: str | None, capability: tuple[int, int], sizes: Mapping[str, int]
) -> None:
    """Raise ConfigError if this rank cannot train with the fp8 `recipe`. `te_version`: Transformer Engine's version;
    `capability`: the GPU's compute capability; `sizes`: name -> dimension of this rank's matrix multiplications."""
    least, unsupported, min_te, block = FP8[recipe]
    hint = "leave train.fp8 out"
    gpu, needed, limit = (".".join(map(str, c)) for c in (capability, least, unsupported))
    te_hint = f"pip install transformer-engine[pytorch], or {hint}"
    is_old_te = not _is_in(te_version or "0", f">={min_te}.dev0")
    old_te = f"{recipe} needs Transformer Engine {min_te}, {te_version} is installed"
    range_text = f"{needed}, below {limit}" if unsupported < NO_LIMIT else needed
    other_gpu = f"{recipe} needs compute capability {range_text}; this GPU has {gpu}"
    wrong_sizes = [f"{name} is {n}, {recipe} needs a multiple of {block}" for name, n in sizes.items() if n % block]
    ConfigError.refuse(
        f"train.fp8={recipe}",
        (not on_gpu, "fp8 needs a GPU", hint),
        (te_version is None, "fp8 needs Transformer Engine, which is not installed", te_hint),
        (is_old_te, old_te, hint),
        (not least <= capability < unsupported, other_gpu, hint),
        *((True, problem, hint) for problem in wrong_sizes),
    )


def _is_in(version: str, supported: str) -> bool:
    """Return whether a version is in a set of versions such as ``>=2.9,<2.12``."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(supported, prereleases=True).contains(version)


def memory_problem(free: int, total: int, needed: float, where: str) -> PlanError | None:
    """Return an error if a GPU has too little free memory, else None.

    `free`, `total`: bytes of the GPU's memory; `needed`: bytes that the plan predicts; `where`: the name of the GPU."""
    if free >= MIN_FREE * needed:
        return None
    hint_too_small = "plan again for this kind of GPU (`holmes nodes` shows it)"
    hint_in_use = "another process holds its memory: end it (`nvidia-smi` shows it), or have Slurm drain the node"
    problem = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, the plan needs {needed / GIB:.1f}"
    return PlanError(problem, where=where, hint=hint_too_small if total < MIN_FREE * needed else hint_in_use)


def shared_gpu(rank: int, other_rank: int, node: str) -> dict[str, str]:
    """Return the arguments of the error that two ranks of `node` have the same GPU."""
    hint = (
        "start one task per GPU: set --ntasks-per-node and --gpus-per-node to the same number (--gpus-per-task hides"
        " the GPUs of other tasks, which may disable NVLink)"
    )
    return {"what": f"ranks {rank} and {other_rank} have the same GPU", "where": f"node {node}", "hint": hint}


def use_cuda(device: str, plan: Plan) -> bool:
    """Return whether to train on CUDA. Raise ConfigError if ``train.device=cuda`` and there is no CUDA device.

    `device`: ``train.device``. ``auto`` means CUDA if this node has a GPU and every pool of the plan has GPUs, because
    all ranks must use the same kind of process group. No other function of training decides between CPU and GPU.
    """
    if device == "cpu" or (device == "auto" and any(plan.site.pool(c.pool).gpu.is_cpu for c in plan.components)):
        return False
    is_available = torch.cuda.is_available()
    if device == "cuda" and not is_available:
        refuse_unusable(collect_facts())
        raise ConfigError("no CUDA device", where="train.device", hint="use train.device=cpu or auto")
    return is_available


def stream_count(plan: Plan, rank: int) -> int:
    """Return the number of CUDA streams of `rank`.

    One stream computes. Each edge of this rank has one stream per direction and communicator. TP, CP and DP have one
    each if larger than 1. Several optimizer instances add two; gradient norm, tied embedding and WORLD add one each.
    """
    p, stage = plan.parallel, plan.parallel.coordinates(rank)[0]
    edges = [edge for edge in plan.transports() if edge.kind == "edge" and rank in edge.ranks]
    # With two stages, the edge that closes the ring of virtual stages connects the same two ranks.
    edges_per_pair = 2 if p.pp == 2 and p.virtual_stages > 1 else 1
    transfers = sum(2 * (plan.edge_connections if e.transport.kind == "tcp" else 1) for e in edges)
    groups = sum(size > 1 for size in (p.tp_of(stage), p.cp_of(stage), p.stages[stage].copies))
    return 1 + edges_per_pair * transfers + groups + (2 if p.optimizer_instances > 1 else 0) + 3


def set_queue_count(plan: Plan, rank: int, environ: MutableMapping[str, str]) -> str | None:
    """Set the number of CUDA's hardware queues in `environ`, one per stream of `rank`. Call it before CUDA starts.

    Streams that share a queue run in launch order, so a waiting transfer would block unrelated work. If `environ` has
    another value, keep it and return a warning. Otherwise, return None.
    """
    needed = str(min(MAX_QUEUES, max(DEFAULT_QUEUES, stream_count(plan, rank))))
    queues = environ.setdefault(CONNECTIONS, needed)
    if queues == needed:
        return None
    return f"{CONNECTIONS}={queues} from the environment is kept; the streams of rank {rank} need {needed}"
