"""Export of weights: from Megatron-Core's names and layouts to Hugging Face's, as safetensors for `transformers`.

config/hugging_face.py maps each model to an existing class of `transformers`.
"""

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

from holmes_hpc import console
from holmes_hpc.config import hugging_face
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import DataError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.find import find_run
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import checkpoint_directory, file_checksums, weight_names
from holmes_hpc.training.checkpoint.hugging_face_folder import CONFIG_COPY, Folder, copy_small_files, new_folder
from holmes_hpc.training.checkpoint.weight_names import Weight
from holmes_hpc.training.checkpoint.weights_for_export import SavedWeights
from holmes_hpc.training.data.prefix import read_summary
from holmes_hpc.training.data.tokenizer import ByteTokenizer

SHARD_BYTES = 5_000_000_000  # at most per .safetensors file, Hugging Face's default
State = Mapping[str, torch.Tensor]  # the full model by Megatron-Core's names, layers counted from 0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PLAN_HINT = "export it with the plan it was trained with"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # padded in the state


@dataclass(frozen=True)
class ExportSummary:
    """The summary of an export, as `holmes export` prints it. `parameters`: shared weights count once; `tokenizer`:
    "file" if the export has a tokenizer file, "bytes" if token ids are bytes, None if the user must add a tokenizer."""

    path: str
    architecture: str
    parameters: int
    files: int
    step: int | None = None
    tokenizer: str | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" after step {self.step:,}"
        notes = {"file": "", "bytes": "; no tokenizer file: token ids are bytes of UTF-8, and 256 ends a document"}
        return f"{self.architecture}{step}: {self.parameters:,} parameters, in {self.path}" + notes.get(
            str(self.tokenizer), "; no tokenizer file: add the one of the run's data (data.tokenizer was not set)"
        )


@dataclass(frozen=True)
class ExportSource:
    """The weights to export and their metadata. `config_folder`: a folder that may have Hugging Face's config and
    tokenizer; `step`: after which a run saved them; `eod`: end of document; `tokenizer`: path of tokenizer.json."""

    state: State
    model: ModelSpec
    config_folder: Path | None = None
    step: int | None = None
    eod: int | None = None
    tokenizer: str | None = None


def find_source(name: str) -> ExportSource:
    """Return the weights of `name`: a run (its latest intact checkpoint) or a checkpoint's directory.
    Raise DataError if there is none. Checksums are verified, which reads all files."""
    if (Path(name) / checkpoint_directory.DESCRIPTION).is_file():
        checkpoint = checkpoint_directory.open_checkpoint(Path(name))
        if (damage := file_checksums.find_damage(checkpoint)) is not None:
            hint = "restore it from a copy, or name another checkpoint"
            raise DataError(f"the checkpoint is damaged ({damage})", where=name, hint=hint)
        if checkpoint.description.get(checkpoint_directory.IMPORTED):
            folder = Folder(checkpoint.path)
            return ExportSource(folder, folder.model, checkpoint.path)
        return run_source(RunDirectory(checkpoint.path.resolve().parents[1]), checkpoint.path, checkpoint.step)
    run = find_run(name)
    for checkpoint in checkpoint_directory.require_checkpoints(run.checkpoints):
        if (damage := file_checksums.find_damage(checkpoint)) is None:
            return run_source(run, checkpoint.path, checkpoint.step)
        console.note(f"warning: checkpoint {checkpoint.path} is damaged ({damage}); trying an earlier one")
    raise DataError("all checkpoints are damaged", where=str(run.checkpoints), hint="restore one from a copy")


def run_source(run: RunDirectory, checkpoint: str | os.PathLike[str], step: int) -> ExportSource:
    """Return the weights of a run's `checkpoint` (a directory, saved after `step`), with the plan's model. The config
    and, if the run's data have none, the tokenizer are those of the Hugging Face folder from which the run started."""
    spec, data = Plan.read(run.plan_path).model, run.config.get("data", {})
    tokenizer, eod = data.get("tokenizer"), _end_of_document(data, spec)
    if tokenizer and not os.path.isfile(tokenizer):
        raise DataError("the run's tokenizer does not exist", where=tokenizer, hint="restore this file")
    return ExportSource(SavedWeights(checkpoint), spec, run.path / CONFIG_COPY, step, eod, tokenizer)


def _end_of_document(data: Mapping[str, Any], spec: ModelSpec) -> int | None:
    """Return the end-of-document token in PREFIX.json; else the byte tokenizer's if `spec` has its vocabulary size."""
    prefix = data.get("prefix")
    names = [p for p in (prefix if isinstance(prefix, list) else [prefix]) if isinstance(p, str)]
    default = ByteTokenizer.eod if spec.vocab == ByteTokenizer.vocab else None
    return next((eod for name in names if 0 <= (eod := read_summary(name).get("eod", -1)) < spec.vocab), default)


def convert(state: State, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face's name, tensor) of the full model, reading `state` weight by weight, without the rows that
    pad the vocabulary. `state` may have Transformer Engine's names. Raise DataError for a missing weight, a wrong
    shape, and values that are not finite."""
    shapes = weight_names.tensor_shapes(spec)
    for weight in weight_names.weights(spec).values():
        megatron_tensor, offset = _read_weight(state, weight, spec), 0
        tensors: dict[str, torch.Tensor] = {}
        for rows in (r for part in weight.parts for r in part):
            shape = shapes[rows.tensor][::-1] if weight.transposed else shapes[rows.tensor]
            tensor = tensors.setdefault(rows.tensor, megatron_tensor.new_empty(shape))
            tensor[rows.first : rows.first + rows.count] = megatron_tensor[offset : offset + rows.count]
            offset += rows.count
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                problem = f"{name} holds values that are not finite"
                raise DataError(problem, where="checkpoint", hint="use an earlier checkpoint")
            yield name, tensor.t().contiguous() if weight.transposed else tensor


def _read_weight(state: State, weight: Weight, spec: ModelSpec) -> torch.Tensor:
    """Return a weight from `state` after checking its shape. For a bias that only GPT-2's format has, return zeros."""
    for name in (weight.name, weight_names.transformer_engine_name(weight.name)):
        if name in state:
            saved = state[name]
            tensor = saved[: spec.vocab] if weight.name in _VOCABULARY else saved
            problem = f"{name} has shape {tuple(saved.shape)}, the model's is {weight.shape}"
            DataError.refuse("checkpoint", (tuple(tensor.shape) != weight.shape, problem, _PLAN_HINT))
            return tensor
    if weight.name.endswith("bias") and "linear" in weight.name and not spec.bias:
        return torch.zeros(weight.shape, dtype=state["decoder.final_layernorm.weight"].dtype)
    raise DataError(f"no weight {weight.name}", where="checkpoint", hint=_PLAN_HINT)


def export(source: ExportSource, out_dir: str | os.PathLike[str], shard_bytes: int = SHARD_BYTES) -> ExportSummary:
    """Write `source` into `out_dir`, which must be missing or empty, and which appears complete or not at all. The
    source's config is copied if it describes this model. Only one shard of `shard_bytes` is in memory at a time."""
    spec, config_folder = source.model, source.config_folder
    out = Path(out_dir)
    with new_folder(out) as temporary:
        weight_map, dtype, parameters, size = _write_shards(convert(source.state, spec), temporary, shard_bytes)
        config = hugging_face_config(spec, str(dtype).removeprefix("torch."), source.eod, config_folder)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files = sorted(set(weight_map.values()))
        if len(files) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        if source.tokenizer:
            shutil.copyfile(source.tokenizer, temporary / "tokenizer.json")
        if config_folder is not None:
            copy_small_files(config_folder, temporary)
        default = "bytes" if spec.vocab == ByteTokenizer.vocab else None
        tokenizer = "file" if any((temporary / name).is_file() for name in TOKENIZER_FILES) else default
    return ExportSummary(str(out), config["architectures"][0], parameters, len(files), source.step, tokenizer)


def hugging_face_config(spec: ModelSpec, dtype: str, eod: int | None, config_folder: Path | None) -> dict[str, Any]:
    """Return the content of config.json: that of `config_folder` if it describes this model, else a new one."""
    if config_folder is not None and (config_folder / hugging_face.CONFIG).is_file():
        model, config = hugging_face.read_model(config_folder), hugging_face.read_config(config_folder)
        if replace(model, name=spec.name, dropout=spec.dropout, vocab_multiple=spec.vocab_multiple) == spec:
            return {**config, "dtype" if "dtype" in config else "torch_dtype": dtype}
    return hugging_face.config_of(spec, dtype, eod)


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int
) -> tuple[dict[str, str], torch.dtype, int, int]:
    """Write all shards. Return (tensor name -> file name, type of the parameters, their number, their bytes)."""
    shards, pending = list[list[str]](), dict[str, torch.Tensor]()
    dtype, parameters, size = torch.float32, 0, 0

    def flush() -> None:
        part = directory / f"part-{len(shards)}"
        try:
            save_file(pending, part, metadata={"format": "pt"})
        except SafetensorError as e:  # the disk failed, since the tensors are valid
            raise OSError(str(e)) from e
        part.chmod(directory.stat().st_mode & 0o666)  # save_file makes it readable for its owner only
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and sum(t.numel() * t.element_size() for t in pending.values()) + nbytes > shard_bytes:
            flush()
        pending[name] = tensor.detach().clone()  # safetensors refuses shared memory
        dtype, parameters, size = tensor.dtype, parameters + tensor.numel(), size + nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    return weight_map, dtype, parameters, size
