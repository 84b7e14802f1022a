"""The weights of a checkpoint by Megatron-Core's names, read one by one without Megatron-Core or a GPU.

Megatron-Core's dist_checkpointing stacks layers along the first axis and experts along the next. It saves each weight
in the pieces that the ranks held. :class:`SavedWeights` returns full weights, whatever the checkpoint's layout.
"""

import itertools
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint import restricted_pickle

_MARKER = "decoder.final_layernorm.weight"  # every GPTModel has it
_LAYERS = "decoder.layers."
_HINT = "export an earlier checkpoint"


class _TensorLoader(DefaultLoadPlanner):
    """A load planner that assembles pieces into one tensor, `target`."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.target[tuple(slice(start, start + length) for start, length in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...


class SavedWeights(Mapping[str, torch.Tensor]):
    """The weights of the checkpoint in `directory`: Megatron-Core's name -> full tensor, layers counted from 0. Each
    access reads the file. Raise DataError for a directory that is no checkpoint or is damaged."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        errors, what = (OSError, pickle.UnpicklingError, MemoryError), "not a readable checkpoint:"
        with DataError.instead_of(*errors, where=self.directory, hint=_HINT, what=what):
            if (problem := restricted_pickle.find_problem(Path(directory))) is not None:
                raise pickle.UnpicklingError(problem)
            self._reader = FileSystemReader(self.directory)
            metadata = restricted_pickle.read_metadata(self.directory)
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            entries = metadata.state_dict_metadata.items()
        prefix = min((key.removesuffix(_MARKER) for key, _ in entries if key.endswith(_MARKER)), key=len, default=None)
        if prefix is None:
            raise DataError("holds no GPT model", where=self.directory, hint="export a checkpoint of a run")
        # name -> the saved tensor's key and metadata, and the index in its stack: the layer, or layer and expert
        self._entries: dict[str, tuple[str, TensorStorageMetadata, tuple[int, ...]]] = {}
        tensors = {k: v for k, v in entries if isinstance(v, TensorStorageMetadata) and k.startswith(prefix)}
        for key, tensor in tensors.items():
            name = key.removeprefix(prefix).replace(".experts.experts.", ".experts.local_experts.{}.")
            layer_part = name.removeprefix(_LAYERS)
            if layer_part != name and not layer_part.split(".")[0].isdecimal():
                name = f"{_LAYERS}{{}}.{layer_part}"
            for index in itertools.product(*map(range, tensor.size[: name.count("{}")])):
                self._entries[name.format(*index)] = key, tensor, index

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> torch.Tensor:
        key, metadata, index = self._entries[name]
        shape = metadata.size[len(index) :]
        padded_shape, offsets = [1] * len(index) + [*shape], [*index] + [0] * len(shape)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(padded_shape))
        pieces = create_read_items_for_chunk_list(key, metadata, [chunk])
        if sum(math.prod(piece.lengths) for piece in pieces) != math.prod(shape):
            raise DataError(f"the checkpoint has only a part of {name}", where=self.directory, hint=_HINT)
        try:
            target = torch.empty(padded_shape, dtype=metadata.properties.dtype, device="cpu")
            self._reader.read_data(LoadPlan(pieces), _TensorLoader(target)).wait()
        except Exception as e:  # damaged bytes can cause any error of torch.load
            problem = f"{name} cannot be read: {restricted_pickle.error_message(e)}"
            raise DataError(problem, where=self.directory, hint=_HINT) from e
        return target.view(shape)
