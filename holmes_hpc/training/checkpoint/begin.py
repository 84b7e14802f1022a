"""Beginning a run with the weights of a Hugging Face folder: every rank reads its own slices into its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import HolmesError
from holmes_hpc.training.checkpoint import weight_names
from holmes_hpc.training.checkpoint.hugging_face_folder import Folder, copy_small
from holmes_hpc.training.model import gpt

KEPT = "hugging_face"  # in the run directory: what an export carries along


def read(path: Path, model: ModelSpec, chunks: Sequence[Any], rank: int) -> dict[str, str] | None:
    """Fill this rank's model `chunks` (GPTModels of `model`, tensor-parallel rank `rank`) from the folder `path`.
    Return what is wrong as a HolmesError's arguments, so that all ranks can raise it.

    Beside the weights themselves it takes memory for at most one tensor's slice: files are mapped, one at a time.
    """
    try:
        folder = Folder(path)
        folder.check_model(model)
        table = weight_names.weights(folder.model)
        with torch.no_grad():
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    whole = weight_names.in_megatron(gpt.global_name(name, chunk))
                    if whole == "output_layer.weight" and model.tied:  # the last stage's copy of the embedding
                        whole = "embedding.word_embeddings.weight"
                    folder.fill(parameter.data, table[whole], rank)
        folder.close()
    except HolmesError as e:
        return {"what": e.what, "where": e.where, "hint": e.hint}
    except (OSError, RuntimeError, SafetensorError) as e:  # of a file that changes under our hands
        what = f"cannot be read: {' '.join(str(e).split())[:200]}"
        return {"what": what, "where": str(path), "hint": "fetch the folder again"}
    return None


def keep(path: Path, run: Path) -> None:
    """Copy config and tokenizer into the run directory, for its exports."""
    (run / KEPT).mkdir(exist_ok=True)
    copy_small(path, run / KEPT)
