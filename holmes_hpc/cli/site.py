"""Commands for the site: nodes, site, probe, label, doctor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app, check_output, load_site
from holmes_hpc.cli.options import Json, Overrides, with_options
from holmes_hpc.config.composition import with_flags
from holmes_hpc.errors import SiteError, counted
from holmes_hpc.fabric import doctor as checks
from holmes_hpc.fabric import label as labels
from holmes_hpc.fabric import listing as report
from holmes_hpc.fabric import node_facts
from holmes_hpc.fabric.grouping import NodeSettings
from holmes_hpc.fabric.probe import probe as probe_node
from holmes_hpc.records.files import write_whole

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration

_ASK_NODES = "Also run a short job on idle nodes of each partition."
Vocabulary = Annotated[str | None, typer.Option(metavar="FILE", help="The site's file of node features.")]


def _read_settings(overrides: Sequence[str] | None) -> tuple[Configuration, NodeSettings]:
    """Return the configuration, and its settings for reading Slurm's nodes.
    The slow imports are in this function, because `holmes probe` and `holmes label` do not need them."""
    from holmes_hpc.config.composition import load
    from holmes_hpc.planning.request import node_settings

    config = load(overrides or [])
    return config, node_settings(config)


@app.command()
@with_options("--site")
def nodes(
    *, overrides: Overrides = None, flags: Mapping[str, Any], vocabulary: Vocabulary = None, json: Json = False
) -> None:
    """List pools, partitions, NICs and GPUs known to Slurm.

    Example: holmes nodes 'partitions=[gpu]' slurm.account=ml"""
    config, settings = _read_settings(with_flags(flags, overrides))
    site = load_site(config) if config.site_file else None
    with console.waiting("asking Slurm"):
        listing = report.listing(replace(settings, vocabulary=vocabulary or settings.vocabulary), site)
    console.output(json, listing.to_dict(), *listing.tables())


@app.command()
def site(
    overrides: Overrides = None,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the file here.")] = None,
    jobs: Annotated[bool, typer.Option("--jobs/--no-jobs", help="Run a short job per new kind of node.")] = True,
    wait: Annotated[int, typer.Option(metavar="S", min=1, help="Wait S seconds for a job to start.")] = 300,
) -> None:
    """Write a site file from what Slurm and its nodes report.

    An existing FILE is renewed: values edited by hand stay, and only new kinds of node are probed. Exit code 1 if
    something remains unknown: the rest is written.

    Example: holmes site -o site.yaml slurm.account=ml"""
    from holmes_hpc.fabric import site_record
    from holmes_hpc.fabric.discovery import discover
    from holmes_hpc.slurm.scontrol import read_topology

    check_output(output)
    record = site_record.read_record(output) if output else {}
    probes = site_record.probes_of(record)
    _, settings = _read_settings(overrides)
    with console.waiting("asking Slurm and the nodes"):
        listing = report.listing(settings)
        earlier = site_record.pools_by_node(record.get("pools") or [])
        discovery = discover(listing, read_topology(), settings, probes, wait if jobs else None, earlier)
    text, problems = site_record.site_text(discovery, [n.name for n in listing.nodes], record)
    if output:
        write_whole(Path(output), text)
        new_jobs = counted(len({p.kind for p in discovery.probes} - {p.kind for p in probes}), "job")
        guesses = counted(text.count("assumed: ") + text.count("unsure: "), "line")
        pools = counted(len(discovery.site.pools), "pool")
        console.note(f"written: {output}: {pools}, {new_jobs}, {guesses} `assumed` or `unsure`")
    else:
        sys.stdout.write(text)
    for problem in problems:
        console.problem(problem)
    raise typer.Exit(int(bool(problems)))


@app.command()
def probe(
    sysfs: Annotated[str, typer.Option(help="Read a copied tree instead of the kernel's.")] = "/sys",
    check: Annotated[bool, typer.Option("--check", help="Compare with Slurm's features of this node.")] = False,
    node: Annotated[str | None, typer.Option(help="Name of this node in Slurm. [the host's name]")] = None,
    vocabulary: Vocabulary = None,
    json: Json = False,
) -> None:
    """Show this node's NICs and the Slurm features it needs. With --check, exit code 1 for a difference.

    Example: holmes probe --check"""
    if not Path(sysfs, "class").is_dir():
        problem, hint = "not a copy of /sys: it has no folder class", "copy /sys/class and /sys/devices from a node"
        raise SiteError(problem, where=sysfs, hint=hint)
    nics = probe_node(Path(sysfs))
    findings = []
    if check:
        with console.waiting("asking Slurm"):
            findings = node_facts.check_here(nics, vocabulary, node)
    document = {**report.probe_dict(nics), "findings": list(map(asdict, findings))}
    console.output(json, document, *report.probe_tables(nics))
    if not json:
        console.text(f"features: {','.join(labels.features_of(nics))}")
        if check:
            console.table(*report.findings_table("Compared with Slurm", findings))
    raise typer.Exit(int(any(f.level != "info" for f in findings)))


@app.command()
def label(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", show_default=False)] = None,
    fabric: Annotated[str | None, typer.Option(help="Also add the feature fabric_NAME.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Run the scontrol commands.")] = False,
    helper: Annotated[bool, typer.Option("--helper", help="Print a node_features/helpers script.")] = False,
    vocabulary: Vocabulary = None,
    json: Json = False,
) -> None:
    """Show the Slurm features that nodes need, or set them. The features that nodes have are kept.

    Example: holmes label ib1 ib2 --fabric ib-a"""
    if helper:
        console.text(labels.helper_script())
        return
    with console.waiting("asking the nodes"):
        changes, findings = node_facts.propose(names, fabric, vocabulary)
    console.note(*map(str, findings))
    lines, commands = labels.slurm_conf_lines(changes), labels.update_commands(changes)
    temporary = ["# until slurmctld restarts (`holmes label --apply` runs it):", *map(" ".join, commands)]
    instructions = ["# in slurm.conf, in the NodeName lines of these nodes:", *lines, *(temporary if commands else [])]
    if json:
        console.as_json({"slurm_conf": lines, "scontrol": commands, "findings": list(map(asdict, findings))})
    else:
        console.text(*(labels.difference_lines(changes) if apply else instructions))
    if not commands:
        console.note("every node that answered has the features it needs")
    elif apply:
        labels.apply(commands)
        console.note(labels.NOT_PERMANENT)


@app.command()
@with_options("--site")
def doctor(
    *,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    ask_nodes: Annotated[bool, typer.Option("--ask-nodes/--no-ask-nodes", help=_ASK_NODES)] = True,
    script: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Also check this batch script.")] = None,
    json: Json = False,
) -> None:
    """Find what would make runs fail or slow down. Exit code 1 if there is an error.

    Example: holmes doctor --script my-job.sbatch"""
    findings = [finding for path in script or [] for finding in checks.read_script(Path(path))]
    with console.waiting("asking Slurm and the nodes"):
        config, settings = _read_settings(with_flags(flags, overrides))
        findings = checks.ordered(findings + checks.examine(settings, ask_nodes, config.site_file))
    if json:
        console.as_json(list(map(asdict, findings)))
    elif findings:
        console.table(*report.findings_table("Findings", findings))
    else:
        console.text("nothing found")
    raise typer.Exit(int(any(f.level == "error" for f in findings)))
