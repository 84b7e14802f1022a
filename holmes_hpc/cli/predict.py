"""`holmes predict`: what a given layout, or a plan, would take."""

from __future__ import annotations

import json as json_text
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, SiteFile, Steps, Tokens, app, check_output, configuration, steps_for
from holmes_hpc.config.plan_options import RECOMPUTE, SCHEDULES, STRATEGIES
from holmes_hpc.errors import ConfigError
from holmes_hpc.records.metrics import PART_NAMES

if TYPE_CHECKING:
    from holmes_hpc.config.configuration import Configuration
    from holmes_hpc.config.model import Batch, ModelSpec
    from holmes_hpc.fabric.site import Site
    from holmes_hpc.planning.cost.costs import Costs
    from holmes_hpc.planning.spec.plan import Plan

Overlap = Annotated[str, typer.Option(metavar="yes|no", help="Whether that goes on beside computing.")]


# What may be told beside a PLAN: what it does not hold itself, or what differs where it is to run.
BESIDE_A_PLAN = (
    "plan_path",
    "site",  # refused with words of its own
    "attention",
    "fused_norm",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_parts",
    "recompute_layers",
    "dtype",
    "grad_dtype",
    "calibration",
    "pace_layer_ms",
    "steps",
    "tokens",
    "trace",
    "json",
)


@app.command()
def predict(
    ctx: typer.Context,
    plan_path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLAN]", show_default=False, help="A file of `holmes plan -o`, whose layout is not told anew."
        ),
    ] = None,
    site: SiteFile = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel size.")] = 1,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences of a micro-batch. [the model's own]")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step. [the model's own]")] = None,
    layers_per_stage: Annotated[str | None, typer.Option(help="26,22; without: as equal as can be.")] = None,
    virtual_stages: Annotated[int, typer.Option(help="Model chunks one pipeline rank holds.")] = 1,
    recompute: Annotated[str, typer.Option(help="none, selective or full; auto: as `plan` would choose")] = "auto",
    recompute_parts: Annotated[
        str | None, typer.Option(help="What selective recomputation computes again: scores,norms,ffn. [scores]")
    ] = None,
    recompute_layers: Annotated[
        int | None, typer.Option(help="Layers of each stage that full recomputation computes again. [all]")
    ] = None,
    schedule: Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}; auto: as `plan` would choose")] = "auto",
    sequence_parallel: Annotated[
        bool | None, typer.Option(show_default=False, help="Activations split over the TP ranks. [as `plan`: with TP]")
    ] = None,
    distributed_optimizer: Annotated[bool, typer.Option(help="Optimizer states shared out over DP.")] = True,
    strategy: Annotated[
        str, typer.Option(help=f"{', '.join(STRATEGIES)}; auto: a pipeline across fabrics where that can be")
    ] = "auto",
    transport: Annotated[str, typer.Option(help="holmes, or single: plain Megatron-LM")] = "holmes",
    model: Annotated[str | None, typer.Option(help="A named model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Of a model without a name, or instead of its own.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width, likewise.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, likewise.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Token ids, likewise. [51200 without a name]")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence. [the model's own]")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Ranks on a node. [all its GPUs]")] = None,
    nodes: Annotated[str | None, typer.Option(help="A part of the site: ib-a=4,roce-a=4")] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="flash, flash1 (its first version), sdpa, softmax (Megatron's fused softmax) or unfused. [as the site"
            " says, or flash]"
        ),
    ] = None,
    fused_norm: Annotated[str | None, typer.Option(metavar="yes|no", help="[as the site says, or yes]")] = None,
    overlap_grad_reduce: Overlap = "yes",
    overlap_param_gather: Overlap = "yes",
    dtype: Annotated[str | None, typer.Option(help="Of weights: fp32, bf16, fp16. [bf16 on GPUs]")] = None,
    grad_dtype: Annotated[str | None, typer.Option(help="Of gradients' sums and traffic. [fp32]")] = None,
    dropout: Annotated[float | None, typer.Option(help="Instead of the model's.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Width of the FFN, instead of the model's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Instead of the model's.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head, instead of hidden / heads.")] = None,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="What data-parallel ranks share out: none, optimizer, or full (FSDP). [as --distributed-optimizer]"
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Another GPU kind than the site's, in every fabric.")] = None,
    calibration: Annotated[str | None, typer.Option(help="A file of `holmes calibrate`, or a layer profile.")] = None,
    pace_layer_ms: Annotated[float | None, typer.Option(help="Paced compute; a PLAN knows its own.")] = None,
    steps: Steps = None,
    tokens: Tokens = None,
    trace: Annotated[str | None, typer.Option(help="Write the simulated timeline here (Perfetto).")] = None,
    json: Json = False,
) -> None:
    """Step time, throughput and memory of one given layout.

    Example: holmes predict --site site.yaml --model gpt_3_6b --tp 1 --pp 2 --dp 32 --micro-batch 4 --global-batch 768
    """
    from holmes_hpc.config.plan_options import PlanOptions
    from holmes_hpc.planning.cost.predict import chrome_trace, timeline
    from holmes_hpc.planning.cost.predict import predict as predict_plan
    from holmes_hpc.planning.narrative import counted_less, duration, throughput, where_stages_lie
    from holmes_hpc.planning.request import costs as costs_of
    from holmes_hpc.planning.request import site as site_of
    from holmes_hpc.planning.request import with_gpu, with_software
    from holmes_hpc.planning.spec.plan import Plan
    from holmes_hpc.schema import make

    check_output(trace)
    config = configuration([], site, calibration=calibration).with_train(
        pace_layer_ms=pace_layer_ms,
        overlap_grad_reduce=_yes(overlap_grad_reduce, "--overlap-grad-reduce"),
        overlap_param_gather=_yes(overlap_param_gather, "--overlap-param-gather"),
        **({"dtype": dtype} if dtype else {}),
        **({} if steps is None else {"steps": steps}),
    )
    if plan_path is not None:
        for name in ctx.params:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE" and name not in BESIDE_A_PLAN:
                raise ConfigError(
                    "a PLAN has its own",
                    where=f"--{name.replace('_', '-')}",
                    hint="leave it out, or give --site FILE with a layout",
                )
    if (plan_path is None) == (site is None):
        raise ConfigError(
            "a PLAN and --site: a plan has its own site" if site else "neither a PLAN nor --site",
            where="predict",
            hint="give one of them: a PLAN, or --site FILE with a layout",
        )
    said: dict[str, Any] = {"sharding": "full"} if sharding == "full" else {}
    software = attention, None if fused_norm is None else _yes(fused_norm, "--fused-norm")
    gradients = _bytes(grad_dtype)
    if plan_path is not None:
        given = Plan.read(plan_path)
        given = replace(given, site=with_software(given.site, *software))
        said |= _recomputed(given.recompute, recompute_parts, recompute_layers)
        costs = costs_of(config, given, said, gradients)
    else:
        if sharding is not None:
            distributed_optimizer = _sharded(sharding)
        said |= _recomputed(recompute, recompute_parts, recompute_layers)
        batch = _batch(model, global_batch, micro_batch, sequence)
        config = replace(
            config,
            batch=batch,
            model=_model(
                model,
                batch.sequence_length,
                layers=layers,
                hidden=hidden,
                heads=heads,
                vocab=vocab,
                ffn=ffn,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dropout=dropout,
            ),
            plan=make(
                PlanOptions,
                {
                    "strategy": strategy,
                    "tp": tp,
                    "pp": pp,
                    "dp": dp,
                    "virtual_stages": virtual_stages,
                    "recompute": recompute,
                    "schedule": schedule,
                    "sequence_parallel": tp > 1 and batch.sequence_length % tp == 0
                    if sequence_parallel is None
                    else sequence_parallel,
                    "distributed_optimizer": distributed_optimizer,
                    "transport": transport,
                    "gpus_per_node": gpus_per_node,
                    "nodes": _nodes(nodes),
                    "layers_per_stage": _numbers(layers_per_stage),
                },
                "plan",
            ),
        )
        costs = costs_of(config, None, said, gradients)
        on = site_of(config)
        given = _chosen_layout(config, with_software(with_gpu(on, gpu) if gpu else on, *software), costs)
    predicted = predict_plan(given, costs)
    asked = steps if tokens is None else steps_for(tokens, given.batch, steps)
    rates = throughput(replace(given, predicted=predicted), asked)
    if trace is not None:
        Path(trace).write_text(json_text.dumps(chrome_trace(timeline(given, costs))), encoding="utf-8")
        console.note(f"written: {trace}")
    if json:
        from dataclasses import asdict

        where = {"strategy": given.strategy, "components": given.layout}
        console.as_json({**asdict(predicted), "throughput": rates, **where})
        return
    console.table(
        f"{given.model.name}, {given.batch.global_size} sequences of {given.batch.sequence_length} tokens a "
        f"step in micro-batches of {given.batch.micro_size}: {given.parallel}, schedule "
        f"{given.schedule.kind}, recompute {given.recompute}",
        ("figure", "predicted"),
        [
            ("lies on", f"{given.spread}: {where_stages_lie(given)}"),
            ("step time", console.seconds(predicted.step_time_s)),
            *_interval(predicted.interval_s),
            ("samples/s", f"{predicted.samples_per_s:.4g}"),
            ("tokens a step", f"{rates['tokens_per_step']:,}"),
            ("tokens/s", f"{rates['tokens_per_s']:,.0f}"),
            *([(f"{asked:,} steps, {rates['tokens']:.3g} tokens", duration(rates["days"]))] if asked else []),
            ("model TFLOP/s per GPU", f"{predicted.model_tflops_per_gpu:.4g}"),
            ("hardware TFLOP/s per GPU", f"{predicted.hardware_tflops_per_gpu:.4g}"),
            *(
                (f"peak memory, stage {i}", f"{size / 2**30:.3g} GiB")
                for i, size in enumerate(predicted.memory_bytes_per_gpu)
            ),
            *((PART_NAMES[part], console.seconds(s)) for part, s in predicted.breakdown.items()),
            *((f"bytes over {nic}, a step", console.data_size(b)) for nic, b in predicted.nic_bytes_per_step.items()),
        ],
        caption="; ".join((*given.assumptions, *counted_less(given, costs))),
    )


def _interval(found: tuple[float, float] | None) -> list[tuple[str, str]]:
    return [("nine of ten like runs", f"{found[0]:.4g} to {found[1]:.4g} s")] if found else []


def _model(name: str | None, sequence: int, **said: float | None) -> ModelSpec:
    """A named model, with what is said of it instead, or a GPT of the given sizes."""
    from holmes_hpc.config.composition import load
    from holmes_hpc.config.models import gpt

    given: dict[str, Any] = {k: v for k, v in said.items() if v is not None}
    if name is not None:
        made = load([f"model={name}"]).model
        return replace(made, **given, max_positions=max(sequence, made.max_positions))
    missing = [f"--{k}" for k in ("layers", "hidden", "heads") if k not in given]
    if missing:
        raise ConfigError(f"no {', '.join(missing)}", where="predict", hint="give --model NAME, or the model's sizes")
    return gpt(**{"name": "gpt", "vocab": 51200, "positions": sequence, "tied": True, **given})


def _batch(model: str | None, global_batch: int | None, micro_batch: int | None, sequence: int | None) -> Batch:
    """The batch of --global-batch, --micro-batch and --sequence; what is not given, a named model brings."""
    from holmes_hpc.config.composition import load
    from holmes_hpc.config.model import Batch

    if model is not None:
        said = {"global_size": global_batch, "micro_size": micro_batch, "sequence_length": sequence}
        return load([f"model={model}", *(f"batch.{k}={v}" for k, v in said.items() if v is not None)]).batch
    if global_batch is None or sequence is None:
        raise ConfigError(
            "no batch is known for a model without a name", where="predict", hint="give --global-batch and --sequence"
        )
    return Batch(global_batch, micro_batch or 1, sequence)


def _chosen_layout(config: Configuration, on: Site, costs: Costs) -> Plan:
    """The layout that --tp, --pp, --dp, … give, with the schedule and the recomputation that `plan` would choose where
    they are not given: of those that fit the shortest step, the plainer of equals."""
    from holmes_hpc.planning.request import given_layout
    from holmes_hpc.planning.schedule.kinds import in_question

    plan = config.plan
    background = plan.transport == "holmes" and (plan.pp or 1) > 1
    schedules = in_question(plan.schedule, plan.virtual_stages or 1, background)[::-1]  # the plainer first
    made = [
        given_layout(replace(config, plan=replace(plan, recompute=again, schedule=schedule)), on, costs)
        for again in (RECOMPUTE if plan.recompute == "auto" else (plan.recompute,))
        for schedule in schedules
    ]
    fit = [p for p in made if not any(a.startswith("it does not fit") for a in p.assumptions)]
    return min(fit, key=_step_time) if fit else made[-1]


def _step_time(plan: Plan) -> float:
    return plan.predicted.step_time_s if plan.predicted else math.inf


def _yes(text: str, where: str) -> bool:
    if text not in ("yes", "no"):
        raise ConfigError(f"{text!r} is neither yes nor no", where=where, hint="write yes or no")
    return text == "yes"


def _recomputed(recompute: str, parts: str | None, layers: int | None) -> dict[str, Any]:
    """Fields of Software for what is computed again; refused where there is no such recomputation."""
    said: dict[str, Any] = {}
    for name, value, kind in (("parts", parts and tuple(parts.split(",")), "selective"), ("layers", layers, "full")):
        if value is not None:
            if recompute != kind:
                raise ConfigError(
                    f"recomputation is {recompute}", where=f"--recompute-{name}", hint=f"it is of --recompute {kind}"
                )
            said[f"recompute_{name}"] = value
    return said


def _bytes(dtype: str | None) -> int | None:
    """Bytes of a gradient's element."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    if dtype is not None and dtype not in sizes:
        raise ConfigError(f"unknown dtype {dtype!r}", where="--grad-dtype", hint="use fp32, bf16 or fp16")
    return sizes[dtype] if dtype else None


def _sharded(sharding: str) -> bool:
    """Whether the optimizer is shared out under --sharding."""
    if sharding not in ("none", "optimizer", "full"):
        raise ConfigError(f"unknown sharding {sharding!r}", where="--sharding", hint="use none, optimizer or full")
    return sharding != "none"


def _numbers(text: str | None) -> list[int] | None:
    try:
        return [int(n) for n in text.split(",")] if text else None
    except ValueError as e:
        raise ConfigError(f"{text!r} is not whole numbers", where="--layers-per-stage", hint="write 26,22") from e


def _nodes(text: str | None) -> dict[str, int] | None:
    try:
        return {k: int(v) for k, v in (part.split("=") for part in text.split(","))} if text else None
    except ValueError as e:
        raise ConfigError(f"{text!r} is not FABRIC=NODES,…", where="--nodes", hint="write ib-a=4,roce-a=4") from e
