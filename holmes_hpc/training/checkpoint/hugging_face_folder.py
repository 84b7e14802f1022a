"""A Hugging Face folder: config.json, safetensors shards, tokenizer. A rank reads its own slices and no more.

`holmes import` makes it a checkpoint of its own: its files stay safetensors, which belong to no layout, beside a
description with their checksums.

What a folder says of itself is held against its family's table before a weight is read. safetensors hold numbers alone;
pickles, which run code when they are read, are refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from holmes_hpc.config import hugging_face
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import DataError
from holmes_hpc.schema import refuse
from holmes_hpc.training.checkpoint import checkpoint_directory, weight_names
from holmes_hpc.training.checkpoint.weight_names import Weight

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
KEPT = "hugging_face"  # in the run directory: what an export carries along of the folder that a run began with
SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_BASE = "transformer."  # that published GPT-2 files leave out
_TYPES = ("F32", "F16", "BF16")
_BLOCK = 1 << 22  # elements looked at at a time
_AGAIN = "fetch the folder again"


class Folder:
    """Whole or a DataError: its model, and which file holds which tensor. No weight is read until it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: ModelSpec = hugging_face.read_model(path)
        self._held: dict[str, tuple[Path, str]] = {}  # tensor -> its file, its name there
        self._open: tuple[Path, Any] | None = None  # the file read last
        found = dict(self._tensors())
        widest = max((n for _, _, shape, _ in found.values() for n in shape), default=0)
        if self.model.layers > len(found) or self.model.heads > widest:  # not worth a table of all their weights
            raise DataError(
                f"holds {len(found)} tensors up to {widest} wide, its config.json says {self.model.layers} "
                f"layers of {self.model.heads} heads",
                where=str(path),
                hint=_AGAIN,
            )
        wanted = weight_names.tensors(self.model)
        family = hugging_face.family_of(self.model)
        for name, (file, own, shape, dtype) in found.items():
            known = next((n for n in (name, _BASE + name) if n in wanted), "")
            if not known and (name.endswith(weight_names.IGNORED) or (self.model.tied and name == "lm_head.weight")):
                continue
            shape_said = wanted.get(known)
            refuse(
                str(file),
                (not known, f"holds {name}, which a {family} of its config.json has not", _AGAIN),
                (shape != shape_said, f"{own} has shape {shape}, its config.json says {shape_said}", _AGAIN),
                (dtype not in _TYPES, f"{own} is of type {dtype}", f"use {', '.join(_TYPES)}"),
                error=DataError,
            )
            self._held[known] = file, own
        missing = [name for name in wanted if name not in self._held]
        if missing:
            raise DataError(
                f"lacks {missing[0]}" + f" and {len(missing) - 1} more" * (len(missing) > 1),
                where=str(path),
                hint=_AGAIN,
            )
        self.files = sorted({file for file, _ in self._held.values()})
        self.parameters = sum(math.prod(shape) for shape in wanted.values())
        self._check_tokenizer()

    def _tensors(self) -> Iterator[tuple[str, tuple[Path, str, tuple[int, ...], str]]]:
        """Of each shard's header: (tensor, (file, its name there, shape, type))."""
        for file in self._shards():
            try:
                with safe_open(file, "np") as read:
                    for name in read.keys():  # noqa: SIM118 (no dictionary)
                        piece = read.get_slice(name)
                        yield name, (file, name, tuple(piece.get_shape()), piece.get_dtype())
            except (OSError, SafetensorError) as e:
                reason = getattr(e, "strerror", None) or (f"not whole safetensors: {e}")
                raise DataError(reason, where=str(file), hint=_AGAIN) from e

    def _shards(self) -> list[Path]:
        index, single = self.path / INDEX, self.path / "model.safetensors"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                inside = all(isinstance(name, str) and Path(name).name == name for name in names)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                raise DataError("not an index of safetensors", where=str(index), hint=_AGAIN) from e
            missing = [name for name in names if inside and not (self.path / name).is_file()]
            lacks = f"lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:3])}"
            refuse(
                str(index),
                (not inside, "names files outside its folder", _AGAIN),
                (missing, lacks, _AGAIN),
                error=DataError,
            )
            return [self.path / name for name in names]
        pickles = sorted(p.name for p in self.path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        is_missing, code = not single.is_file(), "is a pickle, which may run any code when it is read"
        refuse(
            str(self.path),
            (is_missing and pickles, f"{''.join(pickles[:1])} {code}", "convert it to safetensors, or fetch those"),
            (is_missing, "no model.safetensors and no index of shards", _AGAIN),
            error=DataError,
        )
        return [single]

    def _check_tokenizer(self) -> None:
        """tokenizer.json may have no id beyond the model's vocabulary."""
        path = self.path / "tokenizer.json"
        if not path.exists():
            return
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            vocab, added = said["model"]["vocab"], said.get("added_tokens") or []
            ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
            most = max([*ids, *(int(token["id"]) for token in added)], default=-1)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError("not a tokenizer", where=str(path), hint=_AGAIN) from e
        if most >= self.model.vocab:
            raise DataError(
                f"has token id {most}, the model's vocabulary ends at {self.model.vocab - 1}",
                where=str(path),
                hint="take the model's own tokenizer",
            )

    def check_model(self, model: ModelSpec) -> None:
        """Raise DataError when `model` is another one than the folder's."""
        own = replace(self.model, vocab_multiple=model.vocab_multiple)
        checkpoint_directory.check_identity(own.to_dict(), model, str(self.path))
        if not model.rope and model.max_positions != own.max_positions:
            raise DataError(
                f"it has {own.max_positions} learned positions, the model {model.max_positions}",
                where=str(self.path),
                hint=f"use model.max_positions={own.max_positions}",
            )

    def fill(self, target: torch.Tensor, weight: Weight, rank: int = 0) -> None:
        """Read what tensor-parallel rank `rank` holds of `weight` into `target`, of any type; rows that pad a
        vocabulary become 0. DataError for what is no number."""
        share = list(weight_names.share(weight, rank, len(target)))
        width = 0 if weight.columns is None else target.shape[1]
        start = rank * width if weight.split == 1 else 0
        columns = [] if weight.columns is None else [slice(start, start + width)]
        for at, rows in share:
            piece, chosen = self._slice(rows.tensor), (slice(rows.first, rows.first + rows.count), *columns)
            target[at : at + rows.count].copy_(piece[chosen[::-1]].t() if weight.transposed else piece[chosen])
        if weight.split == 0 and len(weight.parts) == 1:
            target[sum(rows.count for _, rows in share) :].zero_()
        rows_at_once = max(1, _BLOCK // max(1, target[0].numel()))  # so that it takes no memory to speak of
        if not all(bool(block.isfinite().all()) for block in target.split(rows_at_once)):
            file, name = self._held[weight.parts[0][0].tensor]
            raise DataError(
                f"{name} holds values that are no numbers as {str(target.dtype).removeprefix('torch.')}",
                where=str(file),
                hint="take weights that are whole",
            )

    def _slice(self, tensor: str) -> Any:
        file, name = self._held[tensor]
        if self._open is None or self._open[0] != file:
            self._open = None  # what was read of another file leaves memory
            self._open = file, safe_open(file, "pt")
        return self._open[1].get_slice(name)

    def close(self) -> None:
        self._open = None


def fill_model(path: Path, model: ModelSpec, chunks: Sequence[Any], rank: int) -> None:
    """Fill this rank's model `chunks` (GPTModels of `model`, tensor-parallel rank `rank`) from the folder `path`.

    Beside the weights themselves it takes memory for at most one tensor's slice: files are mapped, one at a time.
    DataError where the folder is of another model or cannot be read.
    """
    from holmes_hpc.training.model import gpt  # Megatron-Core, which no other reader of a folder needs

    try:
        folder = Folder(path)
        folder.check_model(model)
        weights = weight_names.weights(folder.model).values()
        table = {name: w for w in weights for name in (w.name, weight_names.in_transformer_engine(w.name))}
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                folder.fill(parameter.data, table[gpt.global_name(name, chunk, model.tied)], rank)
        folder.close()
    except (OSError, RuntimeError, SafetensorError) as e:  # of a file that changes under our hands
        reason = f"cannot be read: {' '.join(str(e).split())[:200]}"
        raise DataError(reason, where=str(path), hint=_AGAIN) from e


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` when the block ends well. DataError where `out` is taken or unwritable."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError("it exists and is not an empty directory", where=str(out), hint="choose another directory")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as e:
        raise DataError(
            e.strerror or str(e),
            where=str(e.filename or out),
            hint="choose a directory that can be written and has the space",
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_small(folder: Path, to: Path) -> None:
    """Copy config and tokenizer, but those that are there."""
    for name in SMALL:
        if not (to / name).exists() and (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)


class FolderWeights(Mapping[str, "torch.Tensor"]):
    """A folder's weights under Megatron-Core's names, whole, in the type of the file; each look-up reads it."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self._weights = folder, weight_names.weights(folder.model)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        target: torch.Tensor = self.folder._slice(weight.parts[0][0].tensor)[:1].new_empty(weight.shape)
        self.folder.fill(target, weight)
        return target


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    path: str
    model: str
    parameters: int
    files: int

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.parameters:,} parameters in {self.files} file{'s' * (self.files > 1)}, in "
            f"{self.path}; begin with them by model=hf:{self.path} checkpoint={self.path}"
        )


def import_folder(source: Path, out: Path) -> Imported:
    """Copy the folder `source` to `out`, which must not exist or be empty; it appears complete or not at all.

    DataError for whatever is wrong with it (:class:`Folder`), and for weights that are no numbers.
    """
    folder = Folder(source)
    with new_folder(out) as temporary:
        weights = FolderWeights(folder)
        for name in weights:
            weights[name]  # read once: DataError where it holds what is no number
        folder.close()
        small = [source / name for name in (*SMALL, INDEX) if (source / name).is_file()]
        files = {}
        for path in (*folder.files, *small):
            shutil.copyfile(path, temporary / path.name)
            files[path.name] = list(checkpoint_directory.checksum(temporary / path.name))
        about = {checkpoint_directory.IMPORTED: True, "step": 0, "model": folder.model.to_dict(), "files": files}
        (temporary / checkpoint_directory.DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")
    return Imported(str(out), folder.model.name, folder.parameters, len(folder.files))
