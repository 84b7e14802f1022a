"""A checkpoint's weights under their plain names, read one by one without Megatron-Core, process groups or a GPU.

Megatron-Core's dist_checkpointing stacks the layers of a model along a first axis and cuts every weight into the pieces
that its ranks held; any layout's checkpoint looks the same from here.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint import restricted_pickle

_KNOWN = "decoder.final_layernorm.weight"  # every GPTModel has it
_LAYERS = "decoder.layers."


class _Into(DefaultLoadPlanner):
    """Puts the pieces that are read into one tensor."""

    def __init__(self, target: torch.Tensor, origin: torch.Size) -> None:
        super().__init__()
        self.target, self.origin = target, origin

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.target[tuple(slice(start, start + length) for start, length in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...


class SavedWeights(Mapping[str, torch.Tensor]):
    """The weights of the checkpoint in `directory`: Megatron-Core's name -> whole tensor, layers counted from 0.

    Each look-up reads the file. Raises DataError for what is no checkpoint or is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        try:
            self._reader = FileSystemReader(self.directory)
            metadata = restricted_pickle.read_metadata(self.directory)
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            saved = metadata.state_dict_metadata.items()
        except (OSError, pickle.UnpicklingError, MemoryError) as e:
            raise DataError(
                f"not a checkpoint that can be read: {e}", where=self.directory, hint="export an earlier checkpoint"
            ) from e
        prefix = min((key.removesuffix(_KNOWN) for key, _ in saved if key.endswith(_KNOWN)), key=len, default=None)
        if prefix is None:
            raise DataError("holds no GPT model", where=self.directory, hint="export a checkpoint of a run")
        self._saved: dict[str, tuple[str, TensorStorageMetadata, int | None]] = {}
        tensors = {k: v for k, v in saved if isinstance(v, TensorStorageMetadata) and k.startswith(prefix)}
        for key, value in tensors.items():
            name = key.removeprefix(prefix)
            inside = name.removeprefix(_LAYERS)
            if inside == name or inside.split(".")[0].isdecimal():
                self._saved[name] = key, value, None
            else:
                self._saved |= {f"{_LAYERS}{n}.{inside}": (key, value, n) for n in range(value.size[0])}

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __contains__(self, name: object) -> bool:
        return name in self._saved

    def __getitem__(self, name: str) -> torch.Tensor:
        key, value, layer = self._saved[name]
        size, offsets = list(value.size), [0] * len(value.size)
        if layer is not None:
            size[0], offsets[0] = 1, layer
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))
        items = create_read_items_for_chunk_list(key, value, [chunk])
        if sum(math.prod(i.lengths) for i in items) != math.prod(size):
            raise DataError(f"{name} lacks pieces", where=self.directory, hint="export an earlier checkpoint")
        try:
            target = torch.empty(size, dtype=value.properties.dtype, device="cpu")
            self._reader.read_data(LoadPlan(items), _Into(target, chunk.offsets)).wait()
        except Exception as e:  # damaged bytes end in any error of torch.load
            raise DataError(
                f"{name} cannot be read: {restricted_pickle.line_of(e)}",
                where=self.directory,
                hint="export an earlier checkpoint",
            ) from e
        return target[0] if layer is not None else target
