"""Commands for data sets: data prepare."""

from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app
from holmes_hpc.cli.options import Json
from holmes_hpc.errors import ConfigError
from holmes_hpc.extras import need

group = typer.Typer(no_args_is_help=True, help="Prepare data sets.")
app.add_typer(group, name="data")
_FILES = "Files, or folders of them."


@group.command("prepare")
def data_prepare(
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES...", help=_FILES, show_default=False)] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="PREFIX", help="Path of .bin and .idx.")] = "",
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="Hugging Face tokenizer.json. [bytes]")] = None,
    json_key: Annotated[str, typer.Option(help="Key of the text in JSONL or Parquet.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes. [one per core]")] = None,
    stdlib: Annotated[bool, typer.Option("--stdlib", help="Use Python's own sources, for a trial.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace other data at PREFIX.")] = False,
    json: Json = False,
) -> None:
    """Convert text, JSONL or Parquet to Megatron's indexed format. Compressed files are accepted.

    Example: holmes data prepare a.jsonl.gz texts/ -o d/a"""
    problem = "FILES and --stdlib are mutually exclusive" if files else "no input"
    ConfigError.refuse(
        "data prepare",
        (not output, "no output", "give -o PREFIX"),
        (bool(files) == stdlib, problem, "give either FILES or --stdlib"),
    )
    need("torch")  # check before tokenizing, because Megatron-Core joins the parts
    need("megatron")
    from holmes_hpc.training.data import prepare

    summary = prepare.prepare(
        prepare.demo_files() if stdlib else files or [],
        output,
        tokenizer=tokenizer,
        workers=workers,
        json_key=json_key,
        progress=console.Progress(),
        force=force,
    )
    console.outcome(summary, json)
