"""Commands that decide what runs where: plan, calibrate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app, check_output, load_site, note_partition_limits, requested_steps, show_plan
from holmes_hpc.cli.options import Earliest, Explain, Json, Overrides, Tokens, command_with_keys, with_options
from holmes_hpc.config.composition import load, with_flags
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.errors import ConfigError, counted
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.calibration import NO_CORRECTIONS, Calibration, Corrections, MeasuredPool
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.stage_transfer import stage_transfer_cost
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import throughput
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.records.files import read_yaml, write_whole
from holmes_hpc.submission.lifecycle.requirements import check_training

if TYPE_CHECKING:
    from holmes_hpc.submission.queue_estimate import QueueEstimate

# Overrides for the short run of `holmes calibrate`. The user's overrides come after them and win.
CALIBRATION: tuple[str, ...] = ("train.measure=true", "train.steps=10", "slurm.timeout_min=15", "plan.recompute=none")
CALIBRATION += ("plan.schedule=1f1b",)
_LEARN = "Correct compute and network costs by these runs."
_OUTPUT = "Write the measurements here."
_SECONDS = "Limit the search to S seconds. The plan says what was not tried."


@app.command(cls=command_with_keys("plan", "batch"))
@with_options()
def plan(
    *,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")] = None,
    earliest: Earliest = False,
    seconds: Annotated[float | None, typer.Option(metavar="S", help=_SECONDS)] = None,
    tokens: Tokens = None,
    learn: Annotated[str | None, typer.Option(metavar="RUNS", help=_LEARN)] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Find the fastest plan for a model, and explain it. With --earliest, find the plan that ends first in the queue.

    Example: holmes plan model=gpt_3_6b batch=paper_3_6b --site site.yaml -o plan.yaml"""
    overrides = with_flags(flags, overrides)
    config = load(overrides, nameless=True)
    if earliest:
        from holmes_hpc.cli import submission_steps  # a slow import that most plans do not need

        submission_steps.check_earliest(config)
    batch = Plan.read(config.plan_file).batch if config.plan_file and tokens is not None else config.batch
    steps = requested_steps(config, overrides, flags, tokens, batch)
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    check_output(output)
    is_useless = learn is not None and config.plan_file
    problem = "it cannot change the finished plan of plan_file"
    ConfigError.refuse("--learn", (is_useless, problem, "leave out --learn or plan_file"))
    default_model = None if config.plan_file or any(o.startswith("model") for o in overrides) else config.model.name
    corrections = _learned_corrections(config, learn) if learn is not None else NO_CORRECTIONS
    search_costs = None if config.plan_file else replace(request.costs(config), corrections=corrections)
    clock = Clock(seconds, console.note)
    estimates = submission_steps.earliest_ends(config, clock, search_costs) if earliest else []
    site = None if estimates or config.plan_file else load_site(config)
    chosen = estimates[0].plan if estimates else request.make_plan(config, site, clock, search_costs)
    check_training(config.train, chosen)
    if site is not None:
        note_partition_limits(chosen, config)
    if output:
        chosen.write(output)
    costs = replace(request.costs(config, chosen), corrections=corrections)
    if default_model:
        console.note(f"no model is given: this plans {default_model}; model=NAME plans another (`holmes models`)")
    if json:
        console.as_json(_document(chosen, costs, steps, estimates))
        return
    if estimates:
        submission_steps.show_estimates(estimates, config.train.steps)
        console.text("")
    show_plan(chosen, costs, steps, explain)
    if output:
        console.note(f"written: {output}")


def _document(chosen: Plan, costs: Costs, steps: int | None, estimates: Sequence[QueueEstimate]) -> dict[str, Any]:
    """Return the JSON document of `holmes plan`."""
    slowest = stage_transfer_cost(chosen, costs)
    transfer = slowest.to_dict() if slowest else None
    document = {**chosen.to_dict(), "stage_transfer": transfer, "hop": transfer}  # hop is deprecated: the former name
    document["throughput"] = throughput(chosen, steps)
    return document | ({"earliest": [estimate.to_dict() for estimate in estimates]} if estimates else {})


@app.command()
@with_options("--site")
def calibrate(
    *,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help=_OUTPUT)] = "calibration.yaml",
    json: Json = False,
) -> None:
    """Measure layers and links in a short job. It uses two nodes of each pool; plan and predict read its file.

    Example: holmes calibrate model=gpt_3_6b -o site.cal.yaml; then holmes plan calibration=site.cal.yaml"""
    from holmes_hpc.cli.submission_steps import create_and_submit
    from holmes_hpc.submission.lifecycle import progress

    check_output(output)
    overrides = with_flags(flags, overrides)
    config = request.calibration_config(load([*CALIBRATION, *overrides])).with_data()
    chosen = request.make_plan(config)
    record, job = create_and_submit(chosen, config, overrides)
    console.note(f"job {job.id}: {record.path}")
    if code := progress.report_progress(record, job, show=console.note if json else console.text):
        raise typer.Exit(code)
    measured = read_yaml(record.path / "calibration.yaml")
    write_whole(Path(output), (record.path / "calibration.yaml").read_text(encoding="utf-8"))
    if json:
        console.as_json({"run": str(record.path), "file": output, "calibration": measured})
        return
    calibration = Calibration.from_dict(measured)
    for pool in calibration.fabrics:
        title = f"{chosen.model.name} on {pool.fabric}: {pool.gpu} ({pool.device}), {calibration.dtype}, TP "
        _show_pool(pool, f"{title}{chosen.parallel.tp}")
    if calibration.between:
        links = [(" - ".join(x.between), f"{x.gbps:g} Gb/s", f"{x.delay_ms:g} ms") for x in calibration.between]
        console.table("between fabrics", ("fabrics", "rate", "delay"), links)
    steps = record.read_run()["calibration"]
    _compare(steps["step_time_s"], steps["predicted_step_time_s"], calibration.step_s or 0.0)
    console.note(f"written: {output}")


def _show_pool(pool: MeasuredPool, title: str) -> None:
    """Print a table of a pool's measurements. Warn on stderr about links that are faster than the rate that the site
    states. Links inside nodes without GPUs are not checked, because the site states no rate for them."""
    rows = []
    for p in pool.parts:
        name = f"{p.part}, {p.tokens // p.sequence} x {p.sequence} tokens"
        rows.append((name, f"{p.forward_s * 1e3:.4g} ms", f"{p.backward_s * 1e3:.4g} ms"))
    rows += [(name, f"{x.latency_s * 1e6:.4g} us", f"{x.efficiency:.3g}") for name, x in pool.links.items()]
    if pool.optimizer_s is not None:
        rows.append(("optimizer, a million parameters", f"{pool.optimizer_s * 1e9:.4g} ms", ""))
    rows.append(("remaining pass time", f"{(pool.pass_s or 0.0) * 1e3:.4g} ms", ""))
    columns = ("measured", "forward or latency", "backward or efficiency")
    console.table(title, columns, rows, caption="efficiency: payload rate divided by the site's rate")
    known = {n: x for n, x in pool.links.items() if not (pool.device == "cpu" and n.startswith("local"))}
    if too_fast := ", ".join(f"{name} {x.efficiency:.3g}" for name, x in known.items() if x.efficiency > 1):
        advice = "correct that rate if the network is faster, or check whether the ranks share a node"
        console.note(f"{pool.fabric}: {too_fast} times the site's rate: {advice}")


def _compare(measured_s: float, predicted_s: float, unattributed_s: float) -> None:
    """Print the measured and the predicted step time, and a note if the two differ much.
    `unattributed_s`: seconds of the predicted step that no measured layer or link explains."""
    unattributed = f"of which {unattributed_s * 1e3:.4g} ms belong to no measured part"
    predicted = f"predicted from this calibration: {predicted_s:.4g} s, {unattributed}"
    console.text(f"Measured step time: {measured_s:.4g} s; {predicted}.")
    if not 0.8 < predicted_s / measured_s < 1.25:
        causes = "the nodes had other work during a measurement, or steps wait for something that is not measured"
        console.note(f"measured and predicted step time differ much: {causes}; calibrate again on idle nodes")


def _learned_corrections(config: Configuration, runs: str) -> Corrections:
    """Return the corrections learned from the runs below the directory `runs`.
    Note on stderr how many runs could not be used, and which costs cannot be learned from the usable runs."""
    with console.waiting("learning from runs"):
        learned, unusable = request.learn_from_runs(config, runs)
    if unusable:
        console.note(f"{counted(len(unusable), 'run')} cannot be used, the first: {unusable[0]}")
    if learned.unidentified:
        console.note(f"not corrected, because it cannot be learned from these runs: {', '.join(learned.unidentified)}")
    return learned.corrections
