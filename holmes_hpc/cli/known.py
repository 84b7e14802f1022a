"""Commands about what can be named: models, batches."""

from __future__ import annotations

from dataclasses import asdict

from holmes_hpc import console
from holmes_hpc.cli.app import Json, app
from holmes_hpc.config.models import BATCHES, MODELS


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
