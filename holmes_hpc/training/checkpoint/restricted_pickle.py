"""Reading what the pickles of a checkpoint hold, without running what they name: whoever wrote a checkpoint wrote its
checksums too, so neither says whose code is in it.

A checkpoint of PyTorch's format has three kinds of pickles: ``.metadata`` (where every piece lies), which PyTorch reads
with no restriction; ``common.pt`` and small objects beside the weights, which it reads as it is told; and what
Transformer Engine keeps of fp8, bytes in which it reads another pickle. :func:`enforce` restricts the first two in this
process, :func:`check_extra_states` looks at the third.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata

from holmes_hpc.errors import DataError

_HERE = "torch.distributed.checkpoint"
# The only names that the pickle of a Metadata needs: plain data, and a look-up of a layout by its name.
_METADATA = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    (f"{_HERE}.filesystem", "_StorageInfo"),
    *(
        (f"{_HERE}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "StorageMeta",
        )
    ),
    *(
        (f"{_HERE}.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
}
# What Transformer Engine's states are made of besides its recipes: tensors, whose bytes torch reads as weights only.
_EXTRA = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # its stand-in, in Megatron-Core from 0.17 on
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("_io", "BytesIO"),
}
_RECIPES = "transformer_engine.common.recipe"


class _Restricted(pickle.Unpickler):
    """Finds no name but those it is given, data types of torch, and the names of module `whole`."""

    def __init__(self, data: Any, known: Container[tuple[str, str]], whole: str | None = None) -> None:
        super().__init__(data)
        self._known, self._whole = known, whole

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self._known and not (module == self._whole and name.isidentifier()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no state is made of")
        return super().find_class(module, name)


def read_metadata(directory: str | os.PathLike[str]) -> Metadata:
    """What ``.metadata`` says. pickle.UnpicklingError for one that names code, that is damaged, or whose pieces lie
    outside of the checkpoint; OSError where there is none."""
    with open(Path(directory) / ".metadata", "rb") as file:
        try:
            found = _Restricted(file, _METADATA).load()
        except (pickle.UnpicklingError, OSError, MemoryError):
            raise
        except Exception as e:  # damaged bytes end in any error
            raise pickle.UnpicklingError(f"{type(e).__name__}: {e}") from e
    if not isinstance(found, Metadata) or not all(
        isinstance(part, dict) for part in (found.state_dict_metadata, found.storage_data)
    ):
        raise pickle.UnpicklingError("it describes no checkpoint")
    for place in found.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise pickle.UnpicklingError(f"a piece lies in {name!r}, outside of the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{name} is packed in a way that is not known")
    return found


def _read_metadata(self: FileSystemReader, *_: Any, **__: Any) -> Metadata:
    """In place of FileSystemReader's own, which Megatron-Core's reader is made of."""
    found = read_metadata(self.path)
    about = getattr(found, "storage_meta", None) or metadata.StorageMeta()
    about.load_id, found.storage_meta = self.load_id, about
    return found


def enforce() -> None:
    """From now on this process reads checkpoints without running anything that is in them, whatever a caller of torch
    asks for, and whatever the environment said."""
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals([io.BytesIO])  # what a layer without fp8 keeps is an empty one
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]


def problem(directory: Path) -> str | None:
    """Why the descriptions in a checkpoint cannot be read without running code; None where they can."""
    readers: dict[str, Callable[[], Any]] = {".metadata": partial(read_metadata, directory)}
    if (common := directory / "common.pt").exists():  # later versions of Megatron-Core keep it beside the weights
        readers["common.pt"] = partial(torch.load, common, map_location="cpu", weights_only=True)
    for name, read in readers.items():
        try:
            read()
        except Exception as e:  # damaged bytes end in any error
            return f"{name}: {line_of(e)}"
    return None


def check_extra_states(states: Mapping[str, Any], where: str) -> None:
    """What layers keep beside their weights, which Transformer Engine unpickles. DataError where it names code."""
    for name, state in states.items():
        if not name.endswith("_extra_state") or not isinstance(state, (io.BytesIO, torch.Tensor)):
            continue
        data = state.getvalue() if isinstance(state, io.BytesIO) else bytes(state.cpu().numpy().tobytes())
        try:
            if data and data[:2] != b"PK":  # a zip is torch's own form, which is read as weights only
                _Restricted(io.BytesIO(data), _EXTRA, _RECIPES).load()
        except Exception as e:  # damaged bytes end in any error
            raise DataError(
                f"{name} cannot be read: {line_of(e)}",
                where=where,
                hint="use a checkpoint of your own, or one without fp8",
            ) from e


def line_of(error: BaseException) -> str:
    """An error in a line; of torch's advice about weights only, the name it stumbled upon."""
    text = str(error)
    for mark in ("nsupported global: GLOBAL ", "nsupported GLOBAL ", "nsupported class "):
        if mark in text:
            return f"it names {text.partition(mark)[2].split()[0]}, which no state is made of"
    return " ".join(text.split())[:200] or type(error).__name__


enforce()
