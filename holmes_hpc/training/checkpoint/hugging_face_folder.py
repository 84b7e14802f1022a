"""A Hugging Face folder: config.json, safetensors shards, tokenizer. Each rank reads only its own slices.

`holmes import` copies a folder into a checkpoint: the safetensors, which depend on no layout, and a description with
their checksums. Tensor names, shapes and types are checked against the family's table before a weight is read.
safetensors hold only numbers; pickles, which can execute code, are refused.
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
from holmes_hpc.records.files import DISK_FULL, read_json
from holmes_hpc.records.untrusted import leaves_folder, open_file
from holmes_hpc.training.checkpoint import checkpoint_directory, file_checksums, weight_names
from holmes_hpc.training.checkpoint.weight_names import Weight

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
CONFIG_COPY = "hugging_face"  # in the run directory: the initial folder's config and tokenizer, for exports
SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
_OPTIONAL_PREFIX = "transformer."  # published GPT-2 files omit it
_TYPES = ("F32", "F16", "BF16")
_CHECKED_ELEMENTS = 1 << 22  # elements that are checked at a time for values that are not finite
_FETCH_AGAIN = "fetch the folder again"


class Folder(Mapping[str, "torch.Tensor"]):
    """A complete and consistent Hugging Face folder: Megatron-Core's name -> full weight, in the type of the file. Each
    access reads the file; the constructor reads no weight. It raises DataError for any other folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: ModelSpec = hugging_face.read_model(path)
        self._locations: dict[str, tuple[Path, str]] = {}  # tensor -> its file, its name in the file
        self._open_file: tuple[Path, Any] | None = None  # the last file read
        headers = dict(self._read_headers())
        largest = max((n for _, _, shape, _ in headers.values() for n in shape), default=0)
        is_too_large = self.model.layers * max(1, self.model.experts.count) > len(headers) or self.model.heads > largest
        problem = (
            f"has {len(headers)} tensors with dimensions up to {largest}, but config.json has {self.model.layers} "
            f"layers of {self.model.heads} heads"
        )
        # Checked before tensor_shapes, because a wrong config.json could make a huge table.
        DataError.refuse(str(path), (is_too_large, problem, _FETCH_AGAIN))
        expected_shapes = weight_names.tensor_shapes(self.model)
        family = hugging_face.family_of(self.model)
        for name, (file, name_in_file, shape, dtype) in headers.items():
            tensor = next((n for n in (name, _OPTIONAL_PREFIX + name) if n in expected_shapes), "")
            if not tensor and (name.endswith(weight_names.IGNORED) or (self.model.tied and name == "lm_head.weight")):
                continue
            expected = expected_shapes.get(tensor)
            DataError.refuse(
                str(file),
                (not tensor, f"has tensor {name}, which a {family} model of this config.json lacks", _FETCH_AGAIN),
                (shape != expected, f"{name_in_file} has shape {shape}, config.json implies {expected}", _FETCH_AGAIN),
                (dtype not in _TYPES, f"{name_in_file} has type {dtype}", f"use {', '.join(_TYPES)}"),
            )
            self._locations[tensor] = file, name_in_file
        missing = [name for name in expected_shapes if name not in self._locations]
        problem = f"lacks {''.join(missing[:1])}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
        DataError.refuse(str(path), (missing, problem, _FETCH_AGAIN))
        self.files = sorted({file for file, _ in self._locations.values()})
        self.parameters = sum(math.prod(shape) for shape in expected_shapes.values())
        self.weights = weight_names.weights(self.model)
        self._check_tokenizer()

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self.weights[name]
        target: torch.Tensor = self._open_tensor(weight.parts[0][0].tensor)[:1].new_empty(weight.shape)
        self.fill(target, weight)
        return target

    def _read_headers(self) -> Iterator[tuple[str, tuple[Path, str, tuple[int, ...], str]]]:
        """Yield (name, (file, the same name, shape, type)) of each tensor in the shards' headers."""
        for file in self._shards():
            try:
                open_file(file).close()  # refuses a pipe, on which safe_open would wait without end
                with safe_open(file, "np") as shard:
                    for name in shard.keys():  # noqa: SIM118 (no dictionary)
                        tensor = shard.get_slice(name)
                        yield name, (file, name, tuple(tensor.get_shape()), tensor.get_dtype())
            except (OSError, SafetensorError) as e:
                reason = getattr(e, "strerror", None) or f"damaged safetensors file: {' '.join(str(e).split())[:200]}"
                raise DataError(reason, where=str(file), hint=_FETCH_AGAIN) from e

    def _shards(self) -> list[Path]:
        index, single = self.path / INDEX, self.path / "model.safetensors"
        if index.exists():
            errors, what = (KeyError, TypeError, AttributeError), "not an index of safetensors"
            with DataError.instead_of(*errors, where=index, hint=_FETCH_AGAIN, what=what):
                names = sorted(set(read_json(index, DataError, _FETCH_AGAIN)["weight_map"].values()))
                is_inside = all(isinstance(name, str) and Path(name).name == name for name in names)
            missing = [name for name in names if is_inside and not (self.path / name).is_file()]
            DataError.refuse(
                str(index),
                (not is_inside, "refers to files outside its folder", _FETCH_AGAIN),
                (missing, f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}", _FETCH_AGAIN),
            )
            return [self.path / name for name in names]
        pickles = sorted(p.name for p in self.path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        is_missing, problem = not single.is_file(), f"{', '.join(pickles[:1])} is a pickle, which can execute code"
        hint = "convert it to safetensors, or fetch the model's safetensors files"
        DataError.refuse(
            str(self.path),
            (is_missing and pickles, problem, hint),
            (is_missing, "no model.safetensors and no index of shards", _FETCH_AGAIN),
        )
        return [single]

    def _check_tokenizer(self) -> None:
        """Raise DataError if tokenizer.json has an id beyond the model's vocabulary."""
        path = self.path / "tokenizer.json"
        if not path.exists():
            return
        errors = (ValueError, KeyError, TypeError, AttributeError)
        with DataError.instead_of(*errors, where=path, hint=_FETCH_AGAIN, what="not a tokenizer"):
            content = read_json(path, DataError, _FETCH_AGAIN)
            vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
            ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
            highest_id = max([*ids, *(int(token["id"]) for token in added)], default=-1)
        problem = f"has token id {highest_id}, the model's vocabulary ends at {self.model.vocab - 1}"
        is_beyond = highest_id >= self.model.vocab
        DataError.refuse(str(path), (is_beyond, problem, "use the model's own tokenizer"))

    def check_model(self, model: ModelSpec) -> None:
        """Raise DataError if `model` cannot use the weights of this folder's model."""
        folder_model = replace(self.model, vocab_multiple=model.vocab_multiple)
        checkpoint_directory.check_identity(folder_model.to_dict(), model, str(self.path))
        positions = folder_model.max_positions
        differs = not model.rope and model.max_positions != positions
        problem = f"folder has {positions} learned positions, model has {model.max_positions}"
        DataError.refuse(str(self.path), (differs, problem, f"use model.max_positions={positions}"))

    def fill(self, target: torch.Tensor, weight: Weight, rank: int = 0) -> None:
        """Read the slice of `weight` that tensor-parallel rank `rank` holds into `target`, converted to its type.
        Rows that pad a vocabulary become 0. Raise DataError for values that are not finite."""
        local_rows = list(weight_names.local_rows(weight, rank, len(target)))
        width = 0 if weight.columns is None else target.shape[1]
        start = rank * width if weight.split == 1 else 0
        columns = [] if weight.columns is None else [slice(start, start + width)]
        for row, rows in local_rows:
            tensor, index = self._open_tensor(rows.tensor), (slice(rows.first, rows.first + rows.count), *columns)
            target[row : row + rows.count].copy_(tensor[index[::-1]].t() if weight.transposed else tensor[index])
        if weight.split == 0 and len(weight.parts) == 1:  # may be a vocabulary with rows that pad it
            target[sum(rows.count for _, rows in local_rows) :].zero_()
        block_rows = max(1, _CHECKED_ELEMENTS // max(1, target[0].numel()))  # small blocks save memory
        if not all(bool(block.isfinite().all()) for block in target.split(block_rows)):
            file, name = self._locations[weight.parts[0][0].tensor]
            dtype_name = str(target.dtype).removeprefix("torch.")
            problem = f"{name} has values that are not finite, or become infinite in {dtype_name}"
            raise DataError(problem, where=str(file), hint="use undamaged weights, or train.dtype=bf16")

    def _open_tensor(self, tensor: str) -> Any:
        file, name = self._locations[tensor]
        if self._open_file is None or self._open_file[0] != file:
            self._open_file = None  # frees the memory of the previous file
            self._open_file = file, safe_open(file, "pt")
        return self._open_file[1].get_slice(name)

    def close(self) -> None:
        self._open_file = None


def fill_model(path: Path, model: ModelSpec, chunks: Sequence[Any], rank: int) -> None:
    """Fill this rank's model `chunks` (GPTModels of `model`, tensor-parallel rank `rank`) from the folder `path`, one
    tensor's slice at a time. Raise DataError if the folder is of another model or cannot be read."""
    from holmes_hpc.training.model import gpt  # imports Megatron-Core, which this module needs only here

    try:
        folder = Folder(path)
        folder.check_model(model)
        weights = folder.weights.values()
        table = {name: w for w in weights for name in (w.name, weight_names.transformer_engine_name(w.name))}
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                folder.fill(parameter.data, table[gpt.global_name(name, chunk, model.tied)], rank)
        folder.close()
    except (OSError, RuntimeError, SafetensorError) as e:  # another process may change a file meanwhile
        reason = f"cannot be read: {' '.join(str(e).split())[:200]}"
        raise DataError(reason, where=str(path), hint=_FETCH_AGAIN) from e


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` if the block succeeds.
    Raise DataError if `out` is not an empty directory, or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError("not an empty directory", where=str(out), hint="choose another directory")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as e:
        where = out if e.errno in DISK_FULL else e.filename or out  # a full disk's error names the file that is read
        hint = "choose a writable directory with enough space"
        raise DataError(e.strerror or str(e), where=str(where), hint=hint) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_small_files(folder: Path, target: Path) -> None:
    """Copy the config and tokenizer files of `folder` that `target` lacks."""
    for name in SMALL_FILES:
        if not (target / name).exists() and (folder / name).is_file():
            copy_file(folder / name, target / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file. The copy gives other users no permission that `source` does not give them.
    Raise DataError if `source` is a link to a file outside its folder, which may be a secret of this user."""
    if leaves_folder(source, source.parent):
        problem = f"it is a link out of its folder, to {source.resolve()}"
        raise DataError(problem, where=str(source), hint="put a copy of that file here")
    open_file(source).close()  # refuses a pipe
    shutil.copyfile(source, target)
    target.chmod(target.stat().st_mode & source.stat().st_mode | 0o600)


@dataclass(frozen=True)
class ImportSummary:
    """The summary of an import, as `holmes import` prints it."""

    path: str
    model: str
    parameters: int
    files: int

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.parameters:,} parameters in {self.files} file{'s' * (self.files > 1)}, in "
            f"{self.path}; start a run from them with model=hf:{self.path} checkpoint={self.path}"
        )


def import_folder(source: Path, out: Path) -> ImportSummary:
    """Copy the folder `source` to `out`, which must be missing or empty, and which appears complete or not at all.
    Raise DataError for an inconsistent folder (:class:`Folder`) and for weights that are not finite."""
    folder = Folder(source)
    with new_folder(out) as temporary:
        for name in folder:
            folder[name]  # raises DataError for a value that is not finite
        folder.close()
        small_files = [source / name for name in (*SMALL_FILES, INDEX) if (source / name).is_file()]
        files = {}
        for path in (*folder.files, *small_files):
            copy_file(path, temporary / path.name)
            files[path.name] = list(file_checksums.checksum(temporary / path.name))
        description = {checkpoint_directory.IMPORTED: True, "step": 0, "model": folder.model.to_dict(), "files": files}
        (temporary / checkpoint_directory.DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
    return ImportSummary(str(out), folder.model.name, folder.parameters, len(folder.files))
