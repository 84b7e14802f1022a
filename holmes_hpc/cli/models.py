"""Commands for models: models, batches, import, export, generate."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app
from holmes_hpc.cli.options import Json
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.extras import need
from holmes_hpc.records.find import find_run
from holmes_hpc.training.checkpoint import checkpoint_directory


@app.command()
def models(json: Json = False) -> None:
    """List the named models, each with its default batch.

    Example: holmes models"""
    rows, documents = [], []
    for m in MODELS.values():
        batch = BATCHES.get(m.name)
        batch_cells = (f"{batch.global_size:,}", f"{batch.sequence_length:,}") if batch else (console.NONE,) * 2
        rows.append((m.name, m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, f"{m.vocab:,}", *batch_cells))
        documents.append({**asdict(m), "batch": asdict(batch) if batch else None})
    columns = ("model", "layers", "hidden", "heads", "KV heads", "FFN", "vocabulary", "batch", "sequence")
    caption = "batch: sequences per step; sequence: tokens per sequence"
    console.output(json, documents, ("", columns, rows, caption))


@app.command()
def batches(json: Json = False) -> None:
    """List the named batches, including those of models.

    Example: holmes batches"""
    sizes = {name: (b.global_size, b.micro_size, b.sequence_length, b.tokens) for name, b in BATCHES.items()}
    rows = [(name, *(f"{size:,}" for size in batch)) for name, batch in sizes.items()]
    columns = ("batch", "sequences per step", "per micro-batch", "tokens per sequence", "tokens per step")
    document = {name: {**asdict(b), "tokens": b.tokens} for name, b in BATCHES.items()}
    console.output(json, document, ("", columns, rows))


def _require_checkpoint(run: str) -> None:
    """Raise HolmesError, before torch is imported, if `run` is neither a checkpoint nor a run with one."""
    if not (Path(run) / checkpoint_directory.DESCRIPTION).is_file():
        checkpoint_directory.require_checkpoints(find_run(run).checkpoints)


@app.command("import")
def import_weights(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder with config.json and safetensors.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="CKPT", help="Write here.")],
    json: Json = False,
) -> None:
    """Convert a Hugging Face folder to an initial checkpoint. Any layout can load it.
    Nothing is downloaded, and no code of the folder is run.

    Example: holmes import Qwen3-8B -o qwen3-8b"""
    with console.waiting("reading the weights"):  # includes the slow import of torch
        from holmes_hpc.training.checkpoint.hugging_face_folder import import_folder

        summary = import_folder(Path(folder), Path(output))
    console.outcome(summary, json)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run, or directory of a checkpoint.")],
    safetensors: Annotated[str, typer.Option("--safetensors", metavar="DIR", help="Write here.")],
    json: Json = False,
) -> None:
    """Write the last good checkpoint as Hugging Face safetensors.

    Example: holmes export my-run --safetensors weights/"""
    need("torch")
    _require_checkpoint(run)
    with console.waiting("loading and writing the weights"):
        from holmes_hpc.training.checkpoint.export import export as export_weights
        from holmes_hpc.training.checkpoint.export import find_source

        summary = export_weights(find_source(run), safetensors)
    console.outcome(summary, json)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run, or directory of a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Start of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for a temperature above 0.")] = 1234,
    json: Json = False,
) -> None:
    """Continue a prompt with a run's last good checkpoint. The package transformers computes the text.

    Example: holmes generate my-run --prompt "import os"
    """
    need("transformers")
    _require_checkpoint(run)
    with console.waiting("loading the weights"):
        from holmes_hpc.training.checkpoint.generate import generate as continue_text

        text = continue_text(run, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if json:
        console.as_json({"run": run, "prompt": prompt, "text": text})
    else:
        console.text(prompt + text)
        if not text.strip():
            console.note("the text is blank: train longer, or try --temperature 0.8")
