"""Commands about models: models and batches by name; import, export and generate with weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, app
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.extras import need
from holmes_hpc.records.find import find_run
from holmes_hpc.training.checkpoint import checkpoint_directory


@app.command()
def models(json: Json = False) -> None:
    """The named models, and the batch that each takes when none is given. Example: holmes models"""
    rows = [
        (
            *(m.name, m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, f"{m.vocab:,}"),
            *((f"{b.global_size:,}", f"{b.sequence_length:,}") if (b := BATCHES.get(m.name)) else (console.NONE,) * 2),
        )
        for m in MODELS.values()
    ]
    columns = ("model", "layers", "hidden", "heads", "KV heads", "FFN", "vocabulary", "batch", "sequence")
    console.output(
        json,
        [{**asdict(m), "batch": asdict(BATCHES[m.name]) if m.name in BATCHES else None} for m in MODELS.values()],
        ("", columns, rows, "batch: sequences of a step; sequence: tokens of each"),
    )


@app.command()
def batches(json: Json = False) -> None:
    """The named batches, those that models bring among them. Example: holmes batches"""
    rows = [
        (name, f"{b.global_size:,}", f"{b.micro_size:,}", f"{b.sequence_length:,}", f"{b.tokens:,}")
        for name, b in BATCHES.items()
    ]
    columns = ("batch", "sequences a step", "of a micro-batch", "tokens of a sequence", "tokens a step")
    document = {name: {**asdict(b), "tokens": b.tokens} for name, b in BATCHES.items()}
    console.output(json, document, ("", columns, rows))


def _check(run: str) -> None:
    """Refuse a name of nothing, or a run without a checkpoint, before torch is imported, which takes long."""
    if not (Path(run) / checkpoint_directory.DESCRIPTION).is_file():
        checkpoint_directory.newest(find_run(run).checkpoints)


@app.command("import")
def import_weights(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="config.json, safetensors, tokenizer.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="CKPT", help="Write here.")],
    json: Json = False,
) -> None:
    """A Hugging Face folder as a checkpoint to begin with, in any layout; nothing is fetched, no code of it is run.

    Example: holmes import Qwen3-8B -o qwen3-8b
    """
    with console.waiting("reading the weights"):  # and torch, whose import takes long
        from holmes_hpc.training.checkpoint.hugging_face_folder import import_folder

        made = import_folder(Path(folder), Path(output))
    console.outcome(made, json)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or the directory of a checkpoint.")],
    safetensors: Annotated[str, typer.Option("--safetensors", metavar="DIR", help="Write here.")],
    json: Json = False,
) -> None:
    """The weights of the last good checkpoint with Hugging Face's names.

    Example: holmes export my-run --safetensors weights/
    """
    need("torch")
    _check(run)
    with console.waiting("loading and writing the weights"):
        from holmes_hpc.training.checkpoint.export import export as export_weights
        from holmes_hpc.training.checkpoint.export import find_source

        made = export_weights(find_source(run), safetensors)
    console.outcome(made, json)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or the directory of a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn at a temperature above 0.")] = 1234,
    json: Json = False,
) -> None:
    """A look at what was learned: a text that goes on from a prompt, computed by transformers from the last good
    checkpoint.

    Example: holmes generate my-run --prompt "import os"
    """
    need("transformers")
    _check(run)
    with console.waiting("loading the weights"):
        from holmes_hpc.training.checkpoint.generate import generate as go_on

        text = go_on(run, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if json:
        console.as_json({"run": run, "prompt": prompt, "text": text})
    else:
        console.text(prompt + text)
        if not text.strip():
            console.note("nothing but blanks came: little was learned yet, or try --temperature 0.8")
