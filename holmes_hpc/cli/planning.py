"""Verbs about what to run where: plan and calibrate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import (
    Earliest,
    Json,
    Overrides,
    SiteFile,
    Steps,
    Tokens,
    app,
    asked_site,
    check_output,
    configuration,
    steps_for,
    with_keys,
    with_steps,
)
from holmes_hpc.cli.start import check_choice, earliest_ends, show_ends, start
from holmes_hpc.errors import ConfigError

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration
    from holmes_hpc.planning.cost.corrections import Corrections

# A short run, unless overrides say otherwise.
CALIBRATION = (
    "train.measure=true",
    "train.steps=10",
    "slurm.timeout_min=15",
    "plan.recompute=none",
    "plan.schedule=1f1b",
)


@app.command(cls=with_keys("plan", "batch"))
def plan(
    overrides: Overrides = None,
    site: SiteFile = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    earliest: Earliest = False,
    steps: Steps = None,
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
    from holmes_hpc.planning.cost.corrections import NONE
    from holmes_hpc.planning.narrative import explain, throughput
    from holmes_hpc.planning.request import costs as costs_of
    from holmes_hpc.planning.request import make_plan
    from holmes_hpc.planning.search.explore import Clock
    from holmes_hpc.planning.spec.plan import Plan

    config = configuration(with_steps(overrides, steps), site)
    if earliest:
        check_choice(config)
    if tokens is not None:
        batch = Plan.read(config.plan_file).batch if config.plan_file else config.batch
        config = config.with_train(steps=steps_for(tokens, batch, steps))
    asked = config.train.steps if tokens is not None or any("train.steps=" in o for o in overrides or []) else steps
    check_output(output)
    if learn is not None and config.plan_file:
        raise ConfigError("plan_file names a plan already", where="--learn", hint="leave one of them out")
    corrections = _learned(config, learn) if learn is not None else NONE
    known = None if config.plan_file else replace(costs_of(config), corrections=corrections)
    clock = Clock(seconds, console.note)
    ends = earliest_ends(config, clock, known) if earliest else []
    if ends:
        chosen = ends[0].plan
    else:
        on = None if config.plan_file else asked_site(config)
        chosen = make_plan(config, on, clock, known)
    if output:
        chosen.write(output)
    costs = replace(costs_of(config, chosen), corrections=corrections)
    if json:
        from holmes_hpc.planning.cost.stage_transfer import stage_transfer_cost

        slowest = stage_transfer_cost(chosen, costs)
        console.as_json(
            {
                **chosen.to_dict(),
                "hop": slowest.to_dict() if slowest else None,
                "throughput": throughput(chosen, asked),
                **({"earliest": [c.to_dict() for c in ends]} if ends else {}),
            }
        )
        return
    if ends:
        show_ends(ends, config.train.steps)
        console.text()
    for line in explain(chosen, costs, asked, console.width()):
        console.text(line)
    if output:
        console.note(f"written: {output}")


@app.command()
def calibrate(
    overrides: Overrides = None,
    site: SiteFile = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Write what was measured here.")] = "calibration.yaml",
    json: Json = False,
) -> None:
    """Measure layers and links in a short job on two nodes of each fabric; plan and predict take its file.

    Example: holmes calibrate model=gpt_3_6b -o site.cal.yaml; then holmes plan calibration=site.cal.yaml
    """
    from holmes_hpc.planning.cost.calibration import Calibration
    from holmes_hpc.planning.request import for_calibration, make_plan
    from holmes_hpc.records.files import read_yaml, write_whole
    from holmes_hpc.submission.lifecycle.follow import follow

    check_output(output)
    config = for_calibration(configuration([*CALIBRATION, *(overrides or [])], site)).with_data()
    chosen = make_plan(config)
    record, job = start(chosen, config, overrides)
    console.note(f"job {job.id}: {record.path}")
    if code := follow(record, job, show=console.note if json else console.text):
        raise typer.Exit(code)
    made = read_yaml(record.path / "calibration.yaml")
    write_whole(Path(output), (record.path / "calibration.yaml").read_text(encoding="utf-8"))
    if json:
        console.as_json({"run": str(record.path), "file": output, "calibration": made})
        return
    steps, found = record.read_run()["calibration"], Calibration.from_dict(made)
    for on in found.fabrics:
        console.table(
            f"{chosen.model.name} on {on.fabric}: {on.gpu} ({on.device}), {found.dtype}, TP {chosen.parallel.tp}",
            ("measured", "forward or latency", "backward or efficiency"),
            [
                *(
                    (
                        f"{p.part}, {p.tokens // p.sequence} x {p.sequence} tokens",
                        f"{p.forward_s * 1e3:.4g} ms",
                        f"{p.backward_s * 1e3:.4g} ms",
                    )
                    for p in on.parts
                ),
                *(
                    (name, f"{link.latency_s * 1e6:.4g} us", f"{link.efficiency:.3g}")
                    for name, link in on.links.items()
                ),
                *(
                    [("optimizer, a million parameters", f"{on.optimizer_s * 1e9:.4g} ms", "")]
                    if on.optimizer_s is not None
                    else []
                ),
                ("rest of a pass", f"{(on.pass_s or 0.0) * 1e3:.4g} ms", ""),
            ],
            caption="efficiency: payload's share of the rate that the site gives",
        )
        above = [f"{name} {link.efficiency:.3g}" for name, link in on.links.items() if link.efficiency > 1]
        if above:
            console.note(
                f"{on.fabric}: {', '.join(above)} times the rate that the site gives: a network is faster than"
                " it is said to be (correct the site's figure), or its ranks share a node and never leave it"
            )
    if found.between:
        console.table(
            "between fabrics",
            ("fabrics", "rate", "delay"),
            [(" - ".join(link.between), f"{link.gbps:g} Gb/s", f"{link.delay_ms:g} ms") for link in found.between],
        )
    took, would = steps["step_time_s"], steps["predicted_step_time_s"]
    console.text(
        f"Its own steps took {took:.4g} s; from these figures they would take {would:.4g} s,"
        f" {(found.step_s or 0.0) * 1e3:.4g} ms of it in no part."
    )
    if not 0.8 < would / took < 1.25:
        console.note(
            "these are far apart: the nodes had other work while one of the two was measured, or steps wait"
            " for what no part has; calibrate again on idle nodes"
        )
    console.note(f"written: {output}")


def _learned(config: Configuration, runs: str) -> Corrections:
    """The corrections that the runs below a directory ask for; says which runs say nothing, and what stays unknown."""
    from holmes_hpc.planning.request import learned

    with console.waiting("learning from runs"):
        found, others = learned(config, runs)
    if others:
        console.note(f"{len(others)} runs say nothing, the first: {others[0]}")
    if found.hidden:
        console.note(f"not shown by these runs, so left as it was: {', '.join(found.hidden)}")
    return found.corrections
