"""The command predict: step time, throughput and memory of a layout or a plan."""

import json as json_text
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app, check_output, is_file_argument, requested_steps, show_plan
from holmes_hpc.cli.options import Explain, Json, Overrides, Tokens, command_with_keys, with_options
from holmes_hpc.config.composition import composed, is_fixed_by_plan, with_flags
from holmes_hpc.config.configuration import Configuration, from_dict
from holmes_hpc.config.flags import FLAGS, Flag, quoted, to_override_text
from holmes_hpc.config.megatron_arguments import REQUIRED, read_arguments
from holmes_hpc.config.models import gpt_of_sizes
from holmes_hpc.config.plan_options import RECOMPUTE, PlanOptions
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning import request
from holmes_hpc.planning.cost import predict as simulation
from holmes_hpc.planning.cost.costs import BYTES, Costs
from holmes_hpc.planning.cost.kernels import kind
from holmes_hpc.planning.cost.software import Software
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import throughput
from holmes_hpc.planning.schedule.kinds import candidate_schedules
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.planning.search.per_stage import MIN_GAIN_OF_OPTION
from holmes_hpc.schema import Key, keys

_FP8 = {"none": "no", **dict.fromkeys(("delayed", "current", "mxfp8"), "yes")}  # all recipes are predicted alike


@dataclass(frozen=True)
class _SoftwareFlag(Flag):
    """An option of `holmes predict` that sets a field of Software, the facts about the training program."""

    @property
    def _declared(self) -> Key:
        return keys(Software)[self.key]

    def value(self, text: str) -> Any:
        """Parse the text of an option. A list of names (scores,ffn) becomes a tuple, and the name of an FP8 recipe
        becomes a bool. Other texts are parsed by :meth:`Flag.value`."""
        if self.type is tuple:
            return tuple(text.split(","))
        return super().value(_FP8.get(text, text) if self.key == "fp8" else text)


_SOFTWARE_NAMES = ["--attention", "--fused-norm", "--fused-wgrad", "--overlap-tp", "--aligned-gather", "--fp8"]
_SOFTWARE_NAMES += ["--expert-imbalance", "--sharding", "--instances", "--recompute-parts", "--recompute-layers"]
SOFTWARE_FLAGS = {name: _SoftwareFlag(name, name[2:].replace("-", "_")) for name in _SOFTWARE_NAMES}
_PLAN = "A file of `holmes plan -o`, in place of a layout."
_MODEL_FILE = "A config.json of Hugging Face, in place of --model."
_MEGATRON_ARGS = "Predict for these arguments of Megatron-LM (docs/from-megatron.md)."
_TRACE = "Write the simulated timeline here (Perfetto)."


@app.command(cls=command_with_keys("plan"))
@with_options(more=SOFTWARE_FLAGS)
def predict(
    *,
    plan_path: Annotated[str | None, typer.Argument(metavar="PLAN", show_default=False, help=_PLAN)] = None,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    model_file: Annotated[str | None, typer.Option(metavar="FILE", help=_MODEL_FILE)] = None,
    megatron_args: Annotated[str | None, typer.Option(metavar="FILE|ARGS", help=_MEGATRON_ARGS)] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU kind of every pool. [the site's]")] = None,
    tokens: Tokens = None,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help=_TRACE)] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Predict step time, throughput and memory of a layout. TP, PP, DP and model chunks are 1 unless set; with --nodes,
    DP uses all their GPUs. Stages have equal layers, and the batch is the model's. The rest is chosen as by `plan`.

    Example: holmes predict --site site.yaml --model gpt_3_6b --tp 1 --pp 2 --dp 32 --micro-batch 4 --global-batch 768
    """
    check_output(trace)
    if plan_path is not None and not is_file_argument(plan_path):
        overrides, plan_path = [plan_path, *(overrides or [])], None
    facts = {flag.key: flags[name] for name, flag in SOFTWARE_FLAGS.items() if name in flags}
    flags = {name: value for name, value in flags.items() if name in FLAGS}
    model = [] if model_file is None else [f"model={quoted(f'hf:{model_file}')}"]
    overrides = with_flags(flags, [*model, *(overrides or [])])
    software = _Software(facts, gpu)
    if megatron_args is not None:
        software, overrides = _with_megatron(megatron_args, software, overrides)
    config = _configuration(overrides, plan_path)
    if config.plan_file:
        _refuse_layout({**flags, "--gpu": gpu, "--sharding": software.facts.get("sharding")}, overrides)
        plan = Plan.read(config.plan_file)
        plan = replace(plan, site=software.applied_to(plan.site, {c.pool for c in plan.components}))
        costs = software.costs(config, plan.parallel.sequence_parallel, plan.recompute, plan)
        request.check_fp8(plan.site, {c.pool for c in plan.components}, costs, config.train.fp8)
    else:
        plan, costs = _plan_layout(config, software)
    predicted = simulation.predict(plan, costs)
    steps = requested_steps(config, overrides, flags, tokens, plan.batch)
    plan = replace(plan, predicted=predicted)
    if trace is not None:
        timeline = simulation.chrome_trace(simulation.timeline(plan, costs))
        Path(trace).write_text(json_text.dumps(timeline), encoding="utf-8")
        console.note(f"written: {trace}")
    if json:
        times = {"stage_breakdown": simulation.stage_breakdown_of(plan, costs), "throughput": throughput(plan, steps)}
        facts = {"strategy": plan.strategy, "components": plan.layout, "assumptions": plan.assumptions}
        console.as_json({**asdict(predicted), **times, **facts})
    else:
        show_plan(plan, costs, steps, explain)


@dataclass(frozen=True)
class _Software:
    """The training software and GPUs of a prediction, as set by the options of `holmes predict`.
    `facts`: fields of Software; a missing field takes the site's value if there is one, otherwise the default;
    `gpu`: GPU kind of every pool; None: the site's kinds; `is_megatron`: whether DP fills all GPUs and buckets have
    Megatron-LM's default size, unless the user sets them."""

    facts: Mapping[str, Any]
    gpu: str | None
    is_megatron: bool = False

    def applied_to(self, site: Site, pools: Collection[str] = ()) -> Site:
        """Return `site` with the GPU kind and the software of these options. Raise ConfigError if a GPU kind in `pools`
        (in all pools if empty) cannot run the attention of these options."""
        site = request.with_gpu(site, self.gpu) if self.gpu else site
        attention, gpus = self.facts.get("attention"), {p.gpu for p in site.pools if not pools or p.name in pools}
        no_flash = ", ".join(sorted(gpu.name for gpu in gpus if not gpu.has_bf16))
        no_flash3 = ", ".join(sorted(gpu.name for gpu in gpus if kind(gpu).generation != "hopper"))
        ConfigError.refuse(
            "--attention",
            ("flash" in str(attention) and no_flash, f"{no_flash} has no FlashAttention", "use sdpa or softmax"),
            (attention == "flash3" and no_flash3, f"{no_flash3} cannot run flash3, which is for Hopper", "use flash"),
        )
        return request.with_software(site, attention, self.facts.get("fused_norm"))

    def costs(self, config: Configuration, sequence_parallel: bool, recompute: str, plan: Plan | None = None) -> Costs:
        """Return the costs of compute and communication with this software.
        Raise ConfigError for an option that has no effect with this `sequence_parallel`, `recompute` or `config`."""
        fields = {k: v for k, v in self.facts.items() if k not in ("attention", "fused_norm")}
        for name, needed in (("parts", "selective"), ("layers", "full")):
            problem, is_useless = f"it has no effect, because recomputation is {recompute}", recompute != needed
            hint = f"give --recompute {needed} too, or leave it out"
            ConfigError.refuse(f"--recompute-{name}", (f"recompute_{name}" in fields and is_useless, problem, hint))
        needs_tp = fields.get("overlap_tp") and not sequence_parallel
        problem, hint = "it requires TP above 1 with sequence parallelism", "give --tp and --sequence-parallel too"
        ConfigError.refuse("--overlap-tp", (needs_tp, problem, f"{hint}, or leave it out"))
        needs_overlap = fields.get("aligned_gather") and not config.train.overlap_param_gather
        problem, hint = "it requires --overlap-param-gather yes", "leave one of them out"
        ConfigError.refuse("--aligned-gather", (needs_overlap, problem, hint))
        is_dense = "expert_imbalance" in fields and not (plan or config).model.experts.count
        problem = "it has no effect, because the model has no experts"
        ConfigError.refuse("--expert-imbalance", (is_dense, problem, "leave it out"))
        if fields.get("sharding") in ("none", "optimizer"):  # the plan expresses these two
            del fields["sharding"]
        return request.costs(config, plan, fields)


def _with_megatron(source: str, options: _Software, overrides: Sequence[str]) -> tuple[_Software, list[str]]:
    """Translate Megatron-LM's arguments in `source` to (software settings, overrides), and print them on stderr.
    Values that the user set take precedence. Raise ConfigError if `overrides` name a model."""
    user_keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    problem = "these arguments describe a model, and so does another option"
    ConfigError.refuse("--megatron-args", ("model" in user_keys, problem, "leave out the other model"))
    arguments = read_arguments(source, user_keys)
    missing = [f"--{name}" for name, key in REQUIRED.items() if key not in {*arguments.keys, *user_keys}]
    ConfigError.refuse("--megatron-args", (missing, f"{', '.join(missing)} is missing", "add it to the arguments"))
    console.note(*arguments.description())
    keys = [f"{k}={to_override_text(v)}" for k, v in arguments.keys.items() if k not in user_keys]
    return replace(options, facts={**arguments.facts, **options.facts}, is_megatron=True), [*keys, *overrides]


def _configuration(overrides: Sequence[str], plan_path: str | None) -> Configuration:
    """Return the configuration of a prediction, either for a plan or for a layout on a site. If no model is named, the
    sizes in `overrides` define a GPT. Raise ConfigError for two plans, for a plan with a site, or for neither."""
    data = composed(overrides)
    plan_file, site = plan_path or data["plan_file"], data["site_file"]
    if plan_file is None and site is None:
        site = data["site_file"] = os.environ.get("HOLMES_SITE") or None
    two_plans = f"PLAN is {plan_path}, but plan_file is {data['plan_file']}"
    both_or_none = "PLAN and --site are mutually exclusive" if site else "neither PLAN nor --site is given"
    ConfigError.refuse(
        "predict",
        (data["plan_file"] not in (None, plan_file), two_plans, "leave one of them out"),
        ((plan_file is None) == (site is None), both_or_none, "give PLAN, or --site FILE with a layout"),
    )
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    if plan_file is None and "model" not in keys:
        data |= gpt_of_sizes(data, keys)
    return from_dict({**data, "plan_file": plan_file})


def _refuse_layout(options: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise ConfigError if an option or an override sets a part of the layout, which the PLAN already fixes.
    `options`: {name: value}; None as the value of an option that was not given."""
    names = [name for name, value in options.items() if value is not None]
    fixed = [name for name in names if name not in FLAGS or is_fixed_by_plan(f"{FLAGS[name].key}=")]
    for name in [*fixed, *filter(is_fixed_by_plan, overrides)]:
        hint = "leave it out, or give --site FILE with a layout"
        raise ConfigError("the PLAN already contains it", where=name, hint=hint)


def _plan_layout(config: Configuration, software: _Software) -> tuple[Plan, Costs]:
    """Return a plan with the layout of the configuration, and the plan's costs. Missing sizes are 1, except that with
    plan.nodes or Megatron-LM's arguments, a missing DP fills all GPUs."""
    plan, cp, site = config.plan, config.plan.cp or 1, request.site(config)
    ConfigError.refuse("plan.unequal", (plan.unequal == "true", "stages of a given layout are alike", "leave it out"))
    site = software.applied_to(site, plan.nodes or ())
    tp, length = plan.tp or 1, config.batch.split(cp).sequence_length
    fills_gpus, bucket_bytes = software.is_megatron or plan.nodes, plan.bucket_bytes
    replicas = _replicas(plan, cp, site) if fills_gpus else plan.dp or 1
    if software.is_megatron:
        element = BYTES[config.train.grad_dtype or "fp32"]
        bucket_bytes = bucket_bytes or max(40_000_000, 1_000_000 * replicas * cp) * element  # Megatron-LM's default
    model = replace(config.model, max_positions=max(config.batch.sequence_length, config.model.max_positions))
    is_sharded, sharding = plan.distributed_optimizer, software.facts.get("sharding")  # None: whichever is faster
    if sharding is not None:
        problem = f"--sharding {sharding} contradicts plan.distributed_optimizer={str(is_sharded).lower()}"
        ConfigError.refuse("predict", (is_sharded == (sharding == "none"), problem, "leave one of them out"))
        is_sharded = sharding != "none"
    has_sp = tp > 1 and length % tp == 0 if plan.sequence_parallel is None else plan.sequence_parallel
    layout = replace(plan, tp=tp, pp=plan.pp or 1, dp=replicas, virtual_stages=plan.virtual_stages or 1)
    layout = replace(layout, bucket_bytes=bucket_bytes, sequence_parallel=has_sp, distributed_optimizer=is_sharded)
    config = replace(config, model=model, plan=layout)
    costs = software.costs(config, bool(has_sp), plan.recompute)
    return _fastest_plan(config, site, costs), costs


def _replicas(plan: PlanOptions, cp: int, site: Site) -> int:
    """Return `plan.dp` if it is set; otherwise the data-parallel size that uses all GPUs of the nodes in `plan.nodes`,
    or of the site. Raise ConfigError if TP x PP x CP does not divide the number of these GPUs."""
    nodes = plan.nodes or {pool.name: pool.nodes for pool in site.pools}
    pools = [(site.pool(name), count) for name, count in nodes.items()]
    gpus = sum((count or pool.nodes) * (plan.gpus_per_node or pool.gpus_per_node) for pool, count in pools)
    size = (plan.tp or 1) * (plan.pp or 1) * cp
    message = f"TP x PP x CP is {size}, which does not divide {gpus} GPUs"
    ConfigError.refuse("predict", (not plan.dp and gpus % size, message, "choose the nodes by --nodes, or give --dp"))
    return plan.dp or gpus // size


def _fastest_plan(config: Configuration, site: Site, costs: Costs) -> Plan:
    """Return the plan for the configuration's layout that has the shortest step and fits in memory.
    Schedule, recomputation and sharding of the optimizer are searched unless the user set them. Of equally fast plans,
    return the simplest. If no plan fits, return the last candidate."""
    plan = config.plan
    request.check_fp8(site, plan.nodes or (), costs, config.train.fp8)
    can_use_eager = plan.transport == "holmes" and (plan.pp or 1) > 1
    searched = candidate_schedules("auto", plan.virtual_stages or 1, can_use_eager)[::-1]  # the simplest first
    schedules = searched if plan.schedule == "auto" else (plan.schedule,)
    choices = [
        replace(plan, recompute=recompute, schedule=schedule)
        for recompute in (RECOMPUTE if plan.recompute == "auto" else (plan.recompute,))
        for schedule in schedules
    ]
    make = partial(fixed_plan, config.model, config.batch, site, costs=costs)
    candidates = list(map(make, choices))
    may_replicate = plan.distributed_optimizer is None and candidates[0].parallel.optimizer_instances == 1
    if may_replicate:
        candidates = [*(make(replace(choice, distributed_optimizer=False)) for choice in choices), *candidates]
    fitting = [candidate for candidate in candidates if not candidate.misfit]

    def seconds(candidate: Plan) -> float:
        least_gain = MIN_GAIN_OF_OPTION * (may_replicate and not candidate.parallel.distributed_optimizer)
        return candidate.predicted.step_time_s / (1 - least_gain) if candidate.predicted else math.inf

    return min(fitting, key=seconds, default=candidates[-1])
