"""Verbs about data sets: data prepare."""

from __future__ import annotations

from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, app
from holmes_hpc.extras import need
from holmes_hpc.schema import refuse

group = typer.Typer(no_args_is_help=True, help="Data sets.")
app.add_typer(group, name="data")


@group.command("prepare")
def data_prepare(
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES...", show_default=False)] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="PREFIX", help="Of PREFIX.bin and .idx.")] = "",
    tokenizer: Annotated[str | None, typer.Option(help="A Hugging Face tokenizer.json; without: bytes.")] = None,
    json_key: Annotated[str, typer.Option(help="Where a JSONL line, or a Parquet row, has its text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes; without: one a core.")] = None,
    stdlib: Annotated[bool, typer.Option("--stdlib", help="Python's own sources, for trying.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace other data at PREFIX.")] = False,
    json: Json = False,
) -> None:
    """Text, JSONL, also compressed, or Parquet, of files and folders, to Megatron's indexed data set.

    Example: holmes data prepare a.jsonl.gz texts/ -o d/a
    """
    refuse(
        "data prepare",
        (not output, "no output", "give -o PREFIX"),
        (bool(files) == stdlib, "FILES and --stdlib" if files else "nothing to read", "give FILES, or --stdlib"),
    )
    need("torch")  # before everything is tokenized: what joins the parts is Megatron-Core's
    need("megatron")
    from holmes_hpc.training.data import prepare

    made = (
        prepare.demo_corpus(output, progress=console.Progress(), force=force)
        if stdlib
        else prepare.prepare(
            files or [],
            output,
            tokenizer=tokenizer,
            workers=workers,
            json_key=json_key,
            progress=console.Progress(),
            force=force,
        )
    )
    console.outcome(made, json)
