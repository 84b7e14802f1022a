"""Verbs about what can be named: models, batches."""

from __future__ import annotations

from dataclasses import asdict

from holmes_hpc import console
from holmes_hpc.cli.app import Json, app


@app.command()
def models(json: Json = False) -> None:
    """The named models, and the batch that each takes when none is given. Example: holmes models"""
    from holmes_hpc.config.models import BATCHES, MODELS

    if json:
        console.as_json(
            [{**asdict(m), "batch": asdict(BATCHES[m.name]) if m.name in BATCHES else None} for m in MODELS.values()]
        )
        return
    console.table(
        "",
        ("model", "layers", "hidden", "heads", "KV heads", "FFN", "vocabulary", "batch", "sequence"),
        [
            (
                m.name,
                m.layers,
                m.hidden,
                m.heads,
                m.kv_heads,
                m.ffn,
                f"{m.vocab:,}",
                *(
                    (f"{b.global_size:,}", f"{b.sequence_length:,}")
                    if (b := BATCHES.get(m.name))
                    else (console.NONE,) * 2
                ),
            )
            for m in MODELS.values()
        ],
        caption="batch: sequences of a step; sequence: tokens of each",
    )


@app.command()
def batches(json: Json = False) -> None:
    """The named batches, those that models bring among them. Example: holmes batches"""
    from holmes_hpc.config.models import BATCHES

    if json:
        console.as_json({name: {**asdict(b), "tokens": b.tokens} for name, b in BATCHES.items()})
        return
    console.table(
        "",
        ("batch", "sequences a step", "of a micro-batch", "tokens of a sequence", "tokens a step"),
        [
            (name, f"{b.global_size:,}", f"{b.micro_size:,}", f"{b.sequence_length:,}", f"{b.tokens:,}")
            for name, b in BATCHES.items()
        ],
    )
