"""Megatron-Core on a CPU: replacements for the CUDA calls that it makes.

Megatron-Core names CUDA in many places (``device="cuda"``, ``tensor.cuda()``, streams, the random number generator).
:func:`install` redirects these names to the CPU for the whole process:

* a device argument "cuda", "cuda:N" or N means "cpu", and ``tensor.cuda()`` returns the tensor itself;
* ``tensor.type()`` returns the name of the CUDA type, which Megatron's optimizers compare with;
* streams and events do nothing, because a CPU runs in order;
* the CUDA generator is the CPU's;
* torch's compiler is not used, and not loaded (compiler.py).

Of Megatron-Core itself, only the two functions that read and set the generator's state are replaced.
"""

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from holmes_hpc.training.rank import compiler

_CPU = torch.device("cpu")
_is_installed = False
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"),
    *("scalar_tensor", "tensor", "zeros", "zeros_like"),
)
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `function` that replaces a CUDA device in the keyword argument `device` by the CPU."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def redirect_tensors(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Redirect torch's functions and methods that take a device. `replace`: a function like ``setattr``.
    A torch function mode is not used: it would intercept every call of torch and take a sixth of a small model's time.
    """
    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _NEW)):
        for name in names:
            replace(owner, name, _on_cpu(getattr(owner, name)))
    to, type_name = _on_cpu(torch.Tensor.to), torch.Tensor.type

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(tensor, *map(_cpu, args[:1]), *args[1:], **kwargs)

    def typed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_name(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    replacements = {"to": moved, "type": typed, "cuda": lambda tensor, *args, **kwargs: tensor}
    for name, method in replacements.items():
        replace(torch.Tensor, name, method)


def _cpu(device: Any) -> Any:
    """Return the CPU if `device` is a CUDA device, else `device`, which may also be a dtype or a tensor."""
    if isinstance(device, (str, torch.device)):
        return _CPU if str(device).partition(":")[0] == "cuda" else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


class CpuStream:
    """A stand-in for a CUDA stream or event whose work is always done; also for ``with torch.cuda.stream(...)``."""

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

    def __enter__(self) -> "CpuStream":
        return self


def install() -> None:
    """Redirect CUDA calls to the CPU. Call it before Megatron-Core creates tensors; a second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    compiler.disable()
    redirect_tensors()
    stream = CpuStream()
    for name, value in {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "is_available": lambda: False,  # the original, in a CUDA build, would trust device_count and start CUDA
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
    # Megatron warns when the CPU's generator advances inside a fork of the CUDA one, but these are the same generator.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def thread_count(environ: Mapping[str, str], node_ranks: int, cores: int) -> int:
    """Return the number of compute threads of one rank. OMP_NUM_THREADS takes precedence over Slurm's CPUs per task.
    Without both, the `node_ranks` ranks of the node share its `cores` equally."""
    values = (environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"))
    configured = next((int(value) for value in values if value.isdecimal() and int(value) > 0), None)
    return configured or max(1, cores // max(1, node_ranks))
