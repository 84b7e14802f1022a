"""Exporting weights: from Megatron-Core's names and layouts to Hugging Face's, as safetensors for `transformers`.

Which class of `transformers` computes what a model computes says config/hugging_face.py; no class is invented here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from holmes_hpc.config import hugging_face
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import DataError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.find import find_run
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import checkpoint_directory, weight_names
from holmes_hpc.training.checkpoint.hugging_face_folder import KEPT, Folder, FolderWeights, copy_small, new_folder
from holmes_hpc.training.checkpoint.saved_weights import SavedWeights
from holmes_hpc.training.checkpoint.weight_names import Weight
from holmes_hpc.training.data.prefix import notes
from holmes_hpc.training.data.tokenizer import ByteTokenizer

SHARD_BYTES = 5_000_000_000  # of one .safetensors file, as Hugging Face's own
State = Mapping[str, torch.Tensor]  # Megatron-Core's names of the whole model, layers counted from 0
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # padded in the state


@dataclass(frozen=True)
class Exported:
    """What was written. `parameters` counts a tied head once. `tokenizer`: "file" where one lies beside the weights,
    "bytes" where ids are bytes and need none, None where it is the user's to add."""

    path: str
    architecture: str
    parameters: int
    files: int
    step: int | None = None
    tokenizer: str | None = None

    def __str__(self) -> str:
        after = "" if self.step is None else f" after step {self.step:,}"
        lacks = {"file": "", "bytes": "; no tokenizer file: token ids are bytes of UTF-8, and 256 ends a document"}
        return f"{self.architecture}{after}: {self.parameters:,} parameters, in {self.path}" + lacks.get(
            str(self.tokenizer), "; no tokenizer file: the run had no data.tokenizer, add the one of its data"
        )


@dataclass(frozen=True)
class Chosen:
    """Weights that can be exported, and what belongs to them. `source`: a Hugging Face folder that may be there, with
    config and tokenizer; `tokenizer`: the file of the run's data."""

    state: State
    model: ModelSpec
    source: Path | None = None
    step: int | None = None
    eod: int | None = None
    tokenizer: str | None = None


def choose(name: str) -> Chosen:
    """What `name` says: a run (its last good checkpoint), or the directory of a checkpoint."""
    if (Path(name) / checkpoint_directory.DESCRIPTION).is_file():
        chosen = checkpoint_directory.at(Path(name))
        if chosen.about.get(checkpoint_directory.IMPORTED):
            folder = Folder(chosen.path)
            return Chosen(FolderWeights(folder), folder.model, chosen.path)
        return of_run(RunDirectory(chosen.path.resolve().parents[1]), chosen.path, chosen.step)
    record = find_run(name)
    found = checkpoint_directory.newest(record.checkpoints)
    return of_run(record, found.path, found.step)


def of_run(run: RunDirectory, checkpoint: str | os.PathLike[str], step: int | None = None) -> Chosen:
    """A run's `checkpoint` (a directory, taken after `step`). The model is the plan's; config and tokenizer are those
    of the folder that the run began with, or else the end of a document and the tokenizer's file of the run's data."""
    spec, data = Plan.read(run.plan_path).model, run.config.get("data", {})
    tokenizer = data.get("tokenizer")
    if tokenizer and not os.path.isfile(tokenizer):
        raise DataError("the run's tokenizer is gone", where=tokenizer, hint="put it back")
    return Chosen(SavedWeights(checkpoint), spec, run.path / KEPT, step, _end_of_document(data, spec), tokenizer)


def _end_of_document(data: Mapping[str, Any], spec: ModelSpec) -> int | None:
    """As PREFIX.json says, which `holmes data prepare` writes beside the data."""
    prefix = data.get("prefix")
    names = [p for p in (prefix if isinstance(prefix, list) else [prefix]) if isinstance(p, str)]
    of_bytes = ByteTokenizer.eod if spec.vocab == ByteTokenizer.vocab else None
    return next((eod for name in names if 0 <= (eod := notes(name).get("eod", -1)) < spec.vocab), of_bytes)


def convert(state: State, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face's name, tensor) of the whole model, reading `state` weight by weight.

    Rows that pad the vocabulary are left out. Both of Megatron's layer specifications are understood: its own modules,
    and Transformer Engine's, where a norm is part of the linear layer that follows. Raises DataError for a weight that
    is missing or has another shape than the model's.
    """
    shapes = weight_names.tensors(spec)
    for weight in weight_names.weights(spec).values():
        whole, at = _take(state, weight, spec), 0
        made: dict[str, torch.Tensor] = {}
        for rows in (r for part in weight.parts for r in part):
            shape = shapes[rows.tensor][::-1] if weight.transposed else shapes[rows.tensor]
            tensor = made.setdefault(rows.tensor, whole.new_empty(shape))
            tensor[rows.first : rows.first + rows.count] = whole[at : at + rows.count]
            at += rows.count
        for name, tensor in made.items():
            yield name, tensor.t().contiguous() if weight.transposed else tensor


def _take(state: State, weight: Weight, spec: ModelSpec) -> torch.Tensor:
    """A weight from a state, of the shape that it should have. GPT-2 has biases always: zeros where the model has
    none."""
    for known in (weight.name, weight_names.in_transformer_engine(weight.name)):
        if known in state:
            tensor = state[known]
            kept = tensor[: spec.vocab] if weight.name in _VOCABULARY else tensor
            if tuple(kept.shape) != weight.shape:
                raise DataError(
                    f"{known} has shape {tuple(tensor.shape)}, the model's is {weight.shape}",
                    where="checkpoint",
                    hint="export it with the plan it was trained with",
                )
            return kept
    if weight.name.endswith("bias") and "linear" in weight.name and not spec.bias:
        return torch.zeros(weight.shape, dtype=state["decoder.final_layernorm.weight"].dtype)
    raise DataError(f"no weight {weight.name}", where="checkpoint", hint="export it with the plan it was trained with")


def export(chosen: Chosen, out_dir: str | os.PathLike[str], shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write what was chosen into `out_dir`, which must not exist or be empty; it appears complete or not at all.

    config.json, model.safetensors (several, with an index, above `shard_bytes`), and the tokenizer as tokenizer.json.
    Config (where it describes this model) and tokenizer of the chosen source are carried along. Parameters keep their
    type. Only one shard is held in memory at a time.
    """
    spec, source = chosen.model, chosen.source
    out = Path(out_dir)
    with new_folder(out) as temporary:
        where, dtype, parameters, size = _write_shards(convert(chosen.state, spec), temporary, shard_bytes)
        text = config(spec, str(dtype).removeprefix("torch."), chosen.eod, source)
        (temporary / "config.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        files = sorted(set(where.values()))
        if len(files) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        if chosen.tokenizer:
            shutil.copyfile(chosen.tokenizer, temporary / "tokenizer.json")
        if source is not None:
            copy_small(source, temporary)
        of_bytes = "bytes" if spec.vocab == ByteTokenizer.vocab else None
        beside = "file" if any((temporary / name).is_file() for name in TOKENIZERS) else of_bytes
    return Exported(str(out), text["architectures"][0], parameters, len(files), chosen.step, beside)


def config(spec: ModelSpec, dtype: str, eod: int | None, source: Path | None) -> dict[str, Any]:
    """config.json: the source's own where that says this model."""
    if source is not None and (source / hugging_face.CONFIG).is_file():
        said, own = hugging_face.read_model(source), hugging_face.read_config(source)
        if replace(said, name=spec.name, dropout=spec.dropout, vocab_multiple=spec.vocab_multiple) == spec:
            return {**own, "dtype" if "dtype" in own else "torch_dtype": dtype}
    return hugging_face.config_of(spec, dtype, eod)


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int
) -> tuple[dict[str, str], torch.dtype, int, int]:
    """(file of each tensor, the parameters' type, their number, their bytes)."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    dtype, parameters, size = torch.float32, 0, 0

    def flush() -> None:
        part = directory / f"part-{len(shards)}"
        try:
            save_file(held, part, metadata={"format": "pt"})
        except SafetensorError as e:  # of the disk: the tensors are sound
            raise OSError(str(e)) from e
        part.chmod(directory.stat().st_mode & 0o666)  # written for its owner alone
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and sum(t.numel() * t.element_size() for t in held.values()) + nbytes > shard_bytes:
            flush()
        held[name] = tensor.detach().clone()  # of its own: safetensors refuses shared memory
        dtype, parameters, size = tensor.dtype, parameters + tensor.numel(), size + nbytes
    flush()
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        where.update(dict.fromkeys(names, file))
    return where, dtype, parameters, size
