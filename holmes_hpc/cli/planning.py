"""Verbs about what to run where: plan and calibrate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import (
    Earliest,
    Json,
    Overrides,
    Tokens,
    app,
    asked_site,
    asked_steps,
    check_output,
    takes,
    with_keys,
)
from holmes_hpc.config.composition import load, with_flags
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.calibration import NO_CORRECTIONS, Calibration, Corrections, MeasuredFabric
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.stage_transfer import stage_transfer_cost
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import explain, throughput
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.records.files import read_yaml, write_whole

if TYPE_CHECKING:
    from holmes_hpc.submission.queue_estimate import PlannedStart

# A short run, unless overrides say otherwise.
CALIBRATION = (
    "train.measure=true",
    "train.steps=10",
    "slurm.timeout_min=15",
    "plan.recompute=none",
    "plan.schedule=1f1b",
)


@app.command(cls=with_keys("plan", "batch"))
@takes()
def plan(
    *,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    earliest: Earliest = False,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Search that long at most; the plan says how much better one could still be."),
    ] = None,
    tokens: Tokens = None,
    learn: Annotated[
        str | None, typer.Option(metavar="RUNS", help="Correct computing and networks by the runs in this directory.")
    ] = None,
    json: Json = False,
) -> None:
    """The best plan for a model, why, and the runners-up; with --earliest the one that ends first in today's queue.

    Example: holmes plan model=gpt_3_6b batch=paper_3_6b --site site.yaml -o plan.yaml
    """
    words = with_flags(flags, overrides)
    config = load(words)
    if earliest:
        from holmes_hpc.cli import start  # what talks to Slurm takes long to import, and a plan seldom needs it

        start.check_choice(config)
    batch = Plan.read(config.plan_file).batch if config.plan_file and tokens is not None else config.batch
    asked = asked_steps(config, words, flags, tokens, batch)
    if asked is not None:
        config = config.with_train(steps=asked)
    check_output(output)
    if learn is not None and config.plan_file:
        raise ConfigError("plan_file names a plan already", where="--learn", hint="leave one of them out")
    default_model = None if config.plan_file or any(w.startswith("model=") for w in words) else config.model.name
    corrections = _learned(config, learn) if learn is not None else NO_CORRECTIONS
    known = None if config.plan_file else replace(request.costs(config), corrections=corrections)
    clock = Clock(seconds, console.note)
    ends = start.earliest_ends(config, clock, known) if earliest else []
    site = None if ends or config.plan_file else asked_site(config)
    chosen = ends[0].plan if ends else request.make_plan(config, site, clock, known)
    if output:
        chosen.write(output)
    costs = replace(request.costs(config, chosen), corrections=corrections)
    if default_model:
        console.note(_NO_MODEL.format(default_model))
    if json:
        console.as_json(_document(chosen, costs, asked, ends))
        return
    if default_model:
        console.text(_NO_MODEL.format(default_model))
    if ends:
        start.show_ends(ends, config.train.steps)
        console.text()
    for line in explain(chosen, costs, asked, console.width()):
        console.text(line)
    if output:
        console.note(f"written: {output}")


_NO_MODEL = "no model is given: this plans {}; model=NAME plans another (`holmes models`)"


def _document(chosen: Plan, costs: Costs, steps: int | None, ends: Sequence[PlannedStart]) -> dict[str, Any]:
    """Return what `holmes plan --json` writes."""
    slowest = stage_transfer_cost(chosen, costs)
    return {
        **chosen.to_dict(),
        "hop": slowest.to_dict() if slowest else None,
        "throughput": throughput(chosen, steps),
        **({"earliest": [end.to_dict() for end in ends]} if ends else {}),
    }


@app.command()
@takes("--site")
def calibrate(
    *,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    output: Annotated[str, typer.Option("-o", "--output", help="Write what was measured here.")] = "calibration.yaml",
    json: Json = False,
) -> None:
    """Measure layers and links in a short job on two nodes of each fabric; plan and predict take its file.

    Example: holmes calibrate model=gpt_3_6b -o site.cal.yaml; then holmes plan calibration=site.cal.yaml
    """
    from holmes_hpc.cli.start import start
    from holmes_hpc.submission.lifecycle import progress

    check_output(output)
    words = with_flags(flags, overrides)
    config = request.for_calibration(load([*CALIBRATION, *words])).with_data()
    chosen = request.make_plan(config)
    record, job = start(chosen, config, words)
    console.note(f"job {job.id}: {record.path}")
    if code := progress.follow(record, job, show=console.note if json else console.text):
        raise typer.Exit(code)
    measured = read_yaml(record.path / "calibration.yaml")
    write_whole(Path(output), (record.path / "calibration.yaml").read_text(encoding="utf-8"))
    if json:
        console.as_json({"run": str(record.path), "file": output, "calibration": measured})
        return
    calibration = Calibration.from_dict(measured)
    for fabric in calibration.fabrics:
        title = f"{chosen.model.name} on {fabric.fabric}: {fabric.gpu} ({fabric.device}), {calibration.dtype}, TP "
        _show_fabric(fabric, f"{title}{chosen.parallel.tp}")
    if calibration.between:
        links = [(" - ".join(x.between), f"{x.gbps:g} Gb/s", f"{x.delay_ms:g} ms") for x in calibration.between]
        console.table("between fabrics", ("fabrics", "rate", "delay"), links)
    steps = record.read_run()["calibration"]
    _compare(steps["step_time_s"], steps["predicted_step_time_s"], calibration.step_s or 0.0)
    console.note(f"written: {output}")


def _show_fabric(fabric: MeasuredFabric, title: str) -> None:
    """Print what was measured on a fabric."""
    rows = [
        (
            f"{p.part}, {p.tokens // p.sequence} x {p.sequence} tokens",
            f"{p.forward_s * 1e3:.4g} ms",
            f"{p.backward_s * 1e3:.4g} ms",
        )
        for p in fabric.parts
    ]
    rows += [(name, f"{x.latency_s * 1e6:.4g} us", f"{x.efficiency:.3g}") for name, x in fabric.links.items()]
    if fabric.optimizer_s is not None:
        rows.append(("optimizer, a million parameters", f"{fabric.optimizer_s * 1e9:.4g} ms", ""))
    console.table(
        title,
        ("measured", "forward or latency", "backward or efficiency"),
        [*rows, ("rest of a pass", f"{(fabric.pass_s or 0.0) * 1e3:.4g} ms", "")],
        caption="efficiency: payload's share of the rate that the site gives",
    )
    above = [f"{name} {link.efficiency:.3g}" for name, link in fabric.links.items() if link.efficiency > 1]
    if above:
        console.note(
            f"{fabric.fabric}: {', '.join(above)} times the rate that the site gives: a network is faster than"
            " it is said to be (correct the site's figure), or its ranks share a node and never leave it"
        )


def _compare(measured_s: float, predicted_s: float, rest_s: float) -> None:
    """Print the measured step time beside the one that the calibration predicts."""
    console.text(
        f"Its own steps took {measured_s:.4g} s; from these figures they would take {predicted_s:.4g} s,"
        f" {rest_s * 1e3:.4g} ms of it in no part."
    )
    if not 0.8 < predicted_s / measured_s < 1.25:
        console.note(
            "these are far apart: the nodes had other work while one of the two was measured, or steps wait"
            " for what no part has; calibrate again on idle nodes"
        )


def _learned(config: Configuration, runs: str) -> Corrections:
    """The corrections that the runs below a directory ask for; says which runs say nothing, and what stays unknown."""
    with console.waiting("learning from runs"):
        found, others = request.learned(config, runs)
    if others:
        console.note(f"{len(others)} runs say nothing, the first: {others[0]}")
    if found.unidentified:
        console.note(f"not shown by these runs, so left as it was: {', '.join(found.unidentified)}")
    return found.corrections
