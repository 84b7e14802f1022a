"""torch's compiler, loaded only by ranks that compile, because its import takes as long as that of all other torch."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from holmes_hpc.training.rank import cuda_check

_DYNAMO = "torch._dynamo"
_is_disabled = False


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """Delay ``torch.compile`` in the ``with`` block, in which Megatron-Core is imported.

    Megatron-Core's functions are then compiled at their first call, but not on a CPU or without a C compiler.
    """
    compiler = torch.compile

    def delay(model: Any = None, **options: Any) -> Any:
        return _compile_at_first_call(compiler, model, options) if model else partial(delay, **options)

    torch.compile = delay
    try:
        yield
    finally:
        torch.compile = compiler


def _compile_at_first_call(compiler: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]) -> Any:
    @cache
    def compiled() -> Callable[..., Any]:
        return function if _is_disabled or not cuda_check.can_compile() else compiler(function, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def disable() -> None:
    """Leave the functions of this process uncompiled, and keep torch's optimizers from loading the compiler.
    The optimizers call functions of the compiler that do nothing in uncompiled code. :class:`_Unloaded` replaces these.
    """
    global _is_disabled
    _is_disabled = True
    sys.modules.setdefault(_DYNAMO, _Unloaded(_DYNAMO))


class _Unloaded(ModuleType):
    """A stand-in for ``torch._dynamo`` with the names below. The use of any other name loads the real module."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # called by init_process_group

    def graph_break(self) -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
        """Return `function`, which is not compiled, or a decorator that returns it."""
        return function or (lambda function: function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # read by libraries that inspect all loaded modules
            raise AttributeError(name)
        if sys.modules.get(_DYNAMO) is self:
            del sys.modules[_DYNAMO]
        return getattr(importlib.import_module(_DYNAMO), name)
