"""Megatron-Core on a CPU: everything it needs that is not CUDA, in one place.

Megatron-Core names CUDA in many places (``device="cuda"``, ``tensor.cuda()``, streams, the random number generator).
:func:`install` gives each of these names its meaning on a CPU, for the whole process:

* a device argument "cuda", "cuda:N" or N means "cpu", and ``tensor.cuda()`` is the tensor itself;
* ``tensor.type()`` answers with the name of the CUDA twin, which Megatron's optimizers compare with;
* streams and events do nothing: a CPU runs in order anyway;
* the CUDA generator is the CPU's.

Nothing of Megatron-Core is replaced but the two functions that read and set the state of the generator.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from holmes_hpc.training.rank import cuda_check

_CPU = torch.device("cpu")
_mode: _CudaMeansCpu | None = None


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the devices of every torch call on this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _cpu(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu(kwargs["device"])
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    """Return `device`, or the CPU where it is a CUDA device; what is no device (a dtype, a tensor) stays."""
    if isinstance(device, (str, torch.device)):
        return _CPU if str(device).partition(":")[0] == "cuda" else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


class CpuStream:
    """A CUDA stream or event where there is none: all its work is done. A context, as ``torch.cuda.stream``."""

    device, cuda_stream = _CPU, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _done(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = wait = synchronize = record = __exit__ = _done

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or CpuStream()

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def __enter__(self) -> CpuStream:
        return self


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Import Megatron-Core in here: functions that it hands to ``torch.compile`` are compiled when they are first
    called, and stay as they are where this process trains on its CPU, or nothing can be compiled (cuda_check says so).
    On a CPU nothing is, and loading the compiler would take each rank 2 s and 75 MiB."""
    compiler = torch.compile

    def later(model: Any = None, **options: Any) -> Any:
        return _compiled_later(compiler, model, options) if model else partial(later, **options)

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = compiler


def _compiled_later(compiler: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]) -> Any:
    @cache
    def compiled() -> Callable[..., Any]:
        return function if _mode is not None or not cuda_check.can_compile() else compiler(function, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def install() -> None:
    """Make this process train on its CPU. Call it before Megatron-Core makes anything; again, it changes nothing."""
    global _mode
    if _mode is not None:
        return
    _mode = _CudaMeansCpu()
    _mode.__enter__()
    stream = CpuStream()
    for name, value in {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "is_available": lambda: False,  # a build for CUDA would count the device above, and start CUDA
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": CpuStream,
        "Event": CpuStream,
        "stream": lambda s: s or stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda seed: None,
    }.items():
        setattr(torch.cuda, name, value)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # Megatron warns when the CPU's generator moves inside a fork of the CUDA one: here they are the same.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def threads(environ: Mapping[str, str], ranks_here: int, cores: int) -> int:
    """Return threads for one rank's computing: as Slurm or OMP_NUM_THREADS say, else this machine's cores shared
    fairly."""
    values = (environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"))
    set_threads = next((int(value) for value in values if value.isdecimal() and int(value) > 0), None)
    return set_threads or max(1, cores // max(1, ranks_here))
