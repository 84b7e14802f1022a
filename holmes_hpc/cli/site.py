"""Verbs about what the site has: nodes, probe, label, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, Overrides, app
from holmes_hpc.errors import SiteError
from holmes_hpc.fabric import doctor as doctors
from holmes_hpc.fabric import label as labels
from holmes_hpc.fabric import listing as report
from holmes_hpc.fabric import node_facts
from holmes_hpc.fabric.grouping import NodeSettings
from holmes_hpc.fabric.probe import probe as probe_node

Vocabulary = Annotated[str | None, typer.Option(help="The site's own file of node features.")]


@app.command()
def nodes(vocabulary: Vocabulary = None, json: Json = False) -> None:
    """Fabrics, partitions, NICs, GPUs and states, as Slurm tells them. Example: holmes nodes --json"""
    with console.waiting("asking Slurm"):
        listing = report.listing(NodeSettings(vocabulary=vocabulary))
    console.output(json, listing.to_dict(), *listing.tables())


@app.command()
def probe(
    sysfs: Annotated[str, typer.Option(help="A copied tree instead of the kernel's.")] = "/sys",
    check: Annotated[bool, typer.Option("--check", help="Compare with Slurm's features of this node.")] = False,
    node: Annotated[str | None, typer.Option(help="Its name in Slurm; without: this host's.")] = None,
    vocabulary: Vocabulary = None,
    json: Json = False,
) -> None:
    """This node's NICs from the kernel, and the features it deserves; --check: exit code 1 on a difference.

    Example: holmes probe --check
    """
    if not Path(sysfs, "class").is_dir():
        raise SiteError("no sysfs tree", where=sysfs, hint="copy /sys/class and /sys/devices of a node")
    nics = probe_node(Path(sysfs))
    findings = []
    if check:
        with console.waiting("asking Slurm"):
            findings = node_facts.check_here(nics, vocabulary, node)
    document = {**report.probe_dict(nics), "findings": [f.to_dict() for f in findings]}
    console.output(json, document, *report.probe_tables(nics))
    if not json:
        console.text(f"features: {','.join(labels.features_of(nics))}")
        if check:
            console.table(*report.findings_table("Compared with Slurm", findings))
    raise typer.Exit(int(any(f.level != "info" for f in findings)))


@app.command()
def label(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", show_default=False)] = None,
    fabric: Annotated[str | None, typer.Option(help="Also give them fabric_NAME.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Run the scontrol commands.")] = False,
    helper: Annotated[bool, typer.Option("--helper", help="Print a node_features/helpers script.")] = False,
    vocabulary: Vocabulary = None,
    json: Json = False,
) -> None:
    """The lines that put the features that nodes deserve into Slurm, merged with what they have.

    Example: holmes label ib1 ib2 --fabric ib-a
    """
    if helper:
        console.text(labels.helper_script())
        return
    with console.waiting("asking the nodes"):
        changes, findings = node_facts.propose(names, fabric, vocabulary)
    for finding in findings:
        console.note(str(finding))
    lines, commands = labels.slurm_conf_lines(changes), labels.update_commands(changes)
    for_now = ["# until slurmctld restarts (`holmes label --apply` runs it):", *map(" ".join, commands)]
    to_do = ["# in slurm.conf, in these nodes' own NodeName lines:", *lines, *(for_now if commands else [])]
    if json:
        console.as_json({"slurm_conf": lines, "scontrol": commands, "findings": [f.to_dict() for f in findings]})
    else:
        for line in labels.difference_lines(changes) if apply else to_do:
            console.text(line)
    if not commands:
        console.note("every node that answered has the features it deserves")
    elif apply:
        labels.apply(changes)
        console.note(labels.NOT_PERMANENT)


@app.command()
def doctor(
    overrides: Overrides = None,
    ask_nodes: Annotated[
        bool, typer.Option("--ask-nodes/--no-ask-nodes", help="Also run one short job a partition on idle nodes.")
    ] = True,
    script: Annotated[list[str] | None, typer.Option(help="Also look at a batch script of your own.")] = None,
    json: Json = False,
) -> None:
    """What would make a run fail or crawl here, each with its hint; exit code 1 where there is an error.

    Example: holmes doctor --script my-job.sbatch
    """
    from holmes_hpc.config.composition import load
    from holmes_hpc.planning.request import node_settings

    found = [finding for path in script or [] for finding in doctors.read_script(Path(path))]
    with console.waiting("asking Slurm and the nodes"):
        config = load(overrides or [])
        found = doctors.ordered(found + doctors.examine(node_settings(config), ask_nodes, config.slurm.setup))
    if json:
        console.as_json([f.to_dict() for f in found])
    elif found:
        console.table(*report.findings_table("Findings", found))
    else:
        console.text("nothing found")
    raise typer.Exit(int(any(f.level == "error" for f in found)))
