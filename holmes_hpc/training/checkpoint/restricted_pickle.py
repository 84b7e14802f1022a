"""Safe loading of a checkpoint's pickles: untrusted input must not execute code.

Checksums do not help: whoever writes a checkpoint writes them, too. A checkpoint has three kinds of pickles:

* ``.metadata``, the index of the tensors, which PyTorch loads without restriction;
* ``common.pt`` and small objects beside the weights, which PyTorch restricts only if its caller asks for that;
* Transformer Engine's fp8 state: bytes that contain another pickle.

:func:`enforce` restricts the first two in this process, and :func:`check_extra_states` checks the third.
"""

import enum
import io
import math
import os
import pickle
import resource
from collections.abc import Callable, Container, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata

from holmes_hpc.errors import DataError
from holmes_hpc.records.untrusted import open_file

_PACKAGE = "torch.distributed.checkpoint"
# The only globals that the pickle of a Metadata needs: plain data, and a function that returns a layout by name.
_METADATA_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    (f"{_PACKAGE}.filesystem", "_StorageInfo"),
    *((f"{_PACKAGE}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *product([f"{_PACKAGE}.metadata"], ("Metadata", "MetadataIndex", "TensorProperties")),
    *product([f"{_PACKAGE}.metadata"], ("_MEM_FORMAT_ENCODING", "StorageMeta")),
    *product([f"{_PACKAGE}.planner"], ("SavePlan", "WriteItem", "WriteItemType")),
    *product([f"{_PACKAGE}.planner"], ("TensorWriteData", "BytesIOWriteData")),
}
# The globals of Transformer Engine's states besides its recipes. torch loads the tensors' bytes as weights only.
_EXTRA_STATE_GLOBALS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # Megatron-Core's replacement, from 0.17 on
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("_io", "BytesIO"),
}
_MIN_CPU_S, _BYTES_PER_CPU_S = 2, 1 << 20  # an unpickler reads some 10 MB/s
_MIN_BYTES, _BYTES_PER_BYTE = 1 << 30, 200  # memory that unpickling may take: a minimum, and more per byte of the file
_RECIPE_MODULE = "transformer_engine.common.recipe"


class _RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that resolves only `allowed` globals, torch's data types, and the names of `allowed_module`."""

    def __init__(self, data: Any, allowed: Container[tuple[str, str]], allowed_module: str | None = None) -> None:
        super().__init__(data)
        self._allowed, self._allowed_module = allowed, allowed_module

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in self._allowed and not (module == self._allowed_module and name.isidentifier()):
            raise pickle.UnpicklingError(f"its pickle refers to {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration. Python 3.11.0 to 3.11.3, such as Debian 12's, pickles it as a getattr."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"its pickle refers to {name!r} of {kind!r}, which is not allowed")
    return kind.__members__[name]


def read_metadata(directory: str | os.PathLike[str]) -> Metadata:
    """Return the content of ``.metadata``. Raise OSError if it does not exist.
    Raise pickle.UnpicklingError if it is damaged, refers to a forbidden global, or to a file outside the checkpoint."""
    with open_file(Path(directory) / ".metadata") as file:
        try:
            content = _RestrictedUnpickler(file, _METADATA_GLOBALS).load()
        except (pickle.UnpicklingError, OSError, MemoryError):
            raise
        except Exception as e:  # damaged bytes can cause any error
            raise pickle.UnpicklingError(f"{type(e).__name__}: {e}") from e
    if not isinstance(content, Metadata) or not all(
        isinstance(part, dict) for part in (content.state_dict_metadata, content.storage_data)
    ):
        raise pickle.UnpicklingError("it describes no checkpoint")
    files = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
    for storage_info in content.storage_data.values():
        name = getattr(storage_info, "relative_path", None)
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise pickle.UnpicklingError(f"its pickle refers to file {name!r}, outside the checkpoint")
        if name not in files and os.path.lexists(Path(directory) / name):
            raise pickle.UnpicklingError(f"{name} is not a file")  # a pipe would never end
        if getattr(storage_info, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{name} has an unsupported encoding")
    file_bytes = sum(files.values())
    for name, tensor in content.state_dict_metadata.items():
        size = getattr(tensor, "size", ())
        if math.prod(size) > 8 * file_bytes:  # more elements than bits
            raise pickle.UnpicklingError(f"{name} has {math.prod(size):,} elements in {file_bytes:,} bytes of files")
    return content


def _read_metadata(self: FileSystemReader, *_: Any, **__: Any) -> Metadata:
    """Replace FileSystemReader.read_metadata, which Megatron-Core's reader inherits."""
    content = read_metadata(self.path)
    storage_meta = getattr(content, "storage_meta", None) or metadata.StorageMeta()
    storage_meta.load_id, content.storage_meta = self.load_id, storage_meta
    return content


def enforce() -> None:
    """Make this process load checkpoints without executing code, whatever callers of torch or the environment ask."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals([io.BytesIO])  # a layer without fp8 saves an empty one
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]


def _load_error(load: Callable[[], Any], size: int) -> str:
    """Run `load` in a forked process that limits CPU time and memory. Return its error, "" if there is none.
    The limits grow with `size`, the bytes of the pickle. They are needed because a pickle of nested tuples can take
    years to hash, which this process could not interrupt. A pickle of ten bytes can take 32 GiB of memory."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            limit_s = _MIN_CPU_S + size // _BYTES_PER_CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            max_bytes = psutil.Process().memory_info().vms + _MIN_BYTES + _BYTES_PER_BYTE * size
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
            load()
        except Exception as e:  # damaged bytes can cause any error
            os.write(writer, error_message(e).encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        error = pipe.read().decode()
    return "reading it takes too long, or crashes" if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else error


def find_problem(directory: Path) -> str | None:
    """Return why a checkpoint's ``.metadata`` or ``common.pt`` cannot be loaded safely, or None if both can."""
    loaders: dict[str, Callable[[], Any]] = {".metadata": partial(read_metadata, directory)}
    if (common := directory / "common.pt").exists():  # newer Megatron-Core saves its content beside the weights
        loaders["common.pt"] = partial(torch.load, common, map_location="cpu", weights_only=True)
    for name, load in loaders.items():
        try:
            with open_file(directory / name) as file:
                error = _load_error(load, os.fstat(file.fileno()).st_size)
        except OSError as e:
            error = error_message(e)
        if error:
            return f"{name}: {error}"
    return None


def check_extra_states(states: Mapping[str, Any], where: str) -> None:
    """Raise DataError if an extra state, which Transformer Engine would unpickle, is not safe to load: it refers to a
    forbidden global, or takes too much time or memory."""
    pickles = {}
    for name, state in states.items():
        if name.endswith("_extra_state") and isinstance(state, (io.BytesIO, torch.Tensor)):
            data = state.getvalue() if isinstance(state, io.BytesIO) else bytes(state.cpu().numpy().tobytes())
            if data and data[:2] != b"PK":  # torch loads its own format, a zip, as weights only
                pickles[name] = data

    def load_all() -> None:
        for data in pickles.values():
            _RestrictedUnpickler(io.BytesIO(data), _EXTRA_STATE_GLOBALS, _RECIPE_MODULE).load()

    if pickles and (error := _load_error(load_all, sum(map(len, pickles.values())))):
        problem = f"the fp8 state of {', '.join(list(pickles)[:3])} cannot be read: {error}"
        raise DataError(problem, where=where, hint="use a checkpoint that you wrote yourself, or one without fp8")


def error_message(error: BaseException) -> str:
    """Return an error as one line. torch's text is long and advises to load without weights_only. Only its cause is
    kept: the forbidden global, or other content that is not plain data."""
    text = str(error)
    for prefix in ("nsupported global: GLOBAL ", "nsupported GLOBAL ", "nsupported class "):
        if prefix in text:
            return f"its pickle refers to {text.partition(prefix)[2].split()[0]}, which is not allowed"
    if "weights_only" in text:
        cause = text.partition("WeightsUnpickler error: ")[2].partition("\n")[0][:100]
        return "it is not plain data" + (f" ({cause})" if cause else "")
    return " ".join(text.split())[:200] or type(error).__name__


enforce()
