"""The site, the cost model and the plan of a configuration."""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any

from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import ConfigError, HolmesError, PlanError, RecordError, SiteError, counted, nearest
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.listing import read_site
from holmes_hpc.fabric.local_gpus import local_gpus
from holmes_hpc.fabric.node_gpus import UNKNOWN_GPU
from holmes_hpc.fabric.partitions import NodeSettings, PoolJob
from holmes_hpc.fabric.site import CPU, TRANSFORMER_ENGINE, Gpu, NicType, Pool, Site
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.planning.cost.calibration import NO_CALIBRATION, Calibration
from holmes_hpc.planning.cost.corrections import CorrectionFit, ObservedRun, fit_corrections
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.kernels import kind
from holmes_hpc.planning.cost.profile import from_csv, from_sailor, is_sailor_profile
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.records.files import read_text, read_yaml
from holmes_hpc.records.find import run_directories
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.schema import make
from holmes_hpc.slurm.hostlist import compress, expand

WARM_UP = 3  # number of first steps of a run's latest attempt that are not measured
MAX_RUNS = 32  # largest number of runs to learn from; the last ones in the order of their paths are used


def local_site(processes: int, device: str) -> Site:
    """Return this machine as a site of one node with `processes` ranks: on GPUs if it has one for each rank and
    `device` (``train.device``) is not cpu. ConfigError if `device` is cuda and the GPU kind is unknown."""
    gpus: list[Gpu] = []
    try:
        gpus = local_gpus() if device != "cpu" else []
    except ConfigError:
        if device == "cuda":
            raise
    if len(gpus) >= processes:
        gpu, assumption = gpus[0], f"one machine, {gpus[0].name}"
    else:
        gpu, assumption = CPU, "one machine: each process counts as one accelerator"
    pool = Pool("local", NicType.ETHERNET, "local", 1, processes, ethernet_gbps=10, gpu=gpu, gres=False)
    return Site("local", (pool,), (assumption,))


def load_site(site_file: str | None, settings: NodeSettings) -> Site:
    """Return the site of a site file; without a file, the site that Slurm shows."""
    return read_site_file(site_file) if site_file else read_site(settings)


def site(config: Configuration) -> Site:
    """Return the site of a configuration: of its site file, else this machine (local launcher) or Slurm's nodes."""
    if config.local and not config.site_file:
        plan = config.plan
        sizes = (plan.tp, plan.pp, plan.dp, plan.cp)
        return local_site(plan.gpus_per_node or prod(n or 1 for n in sizes), config.train.device)
    return load_site(config.site_file, node_settings(config))


def node_settings(config: Configuration) -> NodeSettings:
    """Return the settings for reading Slurm's nodes: the site's vocabulary of features, and the partitions to use."""
    names, pools = config.partitions or (), {k: pool for k, pool in (config.slurm.pools or {}).items() if pool}
    return NodeSettings(
        vocabulary=config.vocabulary,
        partitions=(names,) if isinstance(names, str) else tuple(names),
        **{name: getattr(config.slurm, name) for name in ("account", "qos", "reservation", "setup")},
        job_options=config.slurm.job_options(),
        pools={name: PoolJob(pool.job_options(), pool.setup, pool.python or "") for name, pool in pools.items()},
    )


def costs(config: Configuration, plan: Plan | None = None, software_fields: Mapping[str, Any] | None = None) -> Costs:
    """Return the cost model of a configuration, with the emulated compute of `config` or otherwise of `plan`.
    `software_fields`: fields of :class:`Software` that override those that follow from `config.train`."""
    path, train = config.calibration, config.train
    calibration = read_calibration(path, plan or config) if path else NO_CALIBRATION
    facts = Software.facts_of(train, plan.transport_mode if plan else config.plan.transport)
    software = make(Software, {**facts, **(software_fields or {})}, "software")
    return Costs(
        calibration=calibration,
        pace_layer_ms=pace(config, plan),
        software=software,
        pace_factors=train.pace_factors or (plan.pace_factors if plan else None),
        grad_dtype=train.grad_dtype,
        early_step=train.early_step,
        dtype=None if train.dtype == "auto" else train.dtype,
    )


def read_calibration(path: str, target: Plan | Configuration) -> Calibration:
    """Return the calibration, or layer profile (cost/profile.py), in a file. ConfigError if it is for another model."""
    try:
        if path.endswith(".csv"):
            return from_csv(read_text(path), target.model, target.batch)
        data = read_yaml(path)
        is_sailor = is_sailor_profile(data)
        calibration = from_sailor(data, target.model, target.batch) if is_sailor else Calibration.from_dict(data)
        calibration.refuse_other_models(target.model)
        return calibration
    except HolmesError as e:
        raise e if e.where == path else e.moved(lambda place: f"{path}: {place}") from e


def pace(config: Configuration, plan: Plan | None) -> float | None:
    """Return the emulated ms of a layer's forward pass in `config` or otherwise `plan`; None if neither sets it."""
    configured = config.train.pace_layer_ms
    return configured if configured is not None or plan is None else plan.pace_layer_ms


def learn_from_runs(config: Configuration, root: str) -> tuple[CorrectionFit, list[str]]:
    """Return (corrections fitted to the runs at or below `root`, a line `RUN: REASON` for each skipped run).
    Runs are predicted with the calibration of `config`, if it has one. ConfigError if no run can be used."""
    runs, skipped = list[ObservedRun](), list[str]()
    for record in run_directories(root):
        try:
            runs.append(_observed(record, config.calibration))
        except (HolmesError, KeyError, TypeError, ValueError, AttributeError) as e:
            skipped.append(f"{record.name}: {e if isinstance(e, HolmesError) else 'its record is incomplete'}")
    problem = "no run to learn from" + (f" ({skipped[0]})" if skipped else "")
    hint = f"give a directory with runs of at least {WARM_UP + 2} steps"
    ConfigError.refuse(f"--learn {root}", (not runs, problem, hint))
    return fit_corrections(runs[-MAX_RUNS:]), skipped


def _observed(record: RunDirectory, calibration: str | None) -> ObservedRun:
    """Return the plan of a run, and the median times of its latest attempt after the first WARM_UP steps."""
    config, plan = recorded(record.config)[0], Plan.read(record.plan_path)
    if plan.is_per_stage:
        raise RecordError("its plan has per-stage TP/DP", where=str(record.path), hint="learn from uniform layouts")
    all_steps = record.metrics()
    last_attempt = max((int(step.get("attempt") or 1) for step in all_steps), default=1)
    steps = [step for step in all_steps if int(step.get("attempt") or 1) == last_attempt][WARM_UP:]
    if len(steps) < 2:
        raise RecordError(f"fewer than {WARM_UP + 2} steps", where=str(record.path), hint="let it run longer")
    stage_times = zip(*([float(stage["compute_s"]) for stage in step["breakdown"]] for step in steps), strict=True)
    step_s, compute_s = median(float(step["step_time_s"]) for step in steps), tuple(map(median, stage_times))
    return ObservedRun(record.name, plan, costs(replace(config, calibration=calibration), plan), step_s, compute_s)


def make_plan(
    config: Configuration, target_site: Site | None = None, clock: Clock | None = None, cost_model: Costs | None = None
) -> Plan:
    """Return the plan in the plan file of `config`. Without a plan file, return the best plan for the model.
    `target_site` and `cost_model` default to those of `config`. `clock`: see :func:`best_plan`."""
    if config.plan_file:
        plan = Plan.read(config.plan_file)
        check_pace_factors(plan.site, config)
        cost_model = costs(replace(config, calibration=None), plan)
        check_fp8(plan.site, {c.pool for c in plan.components}, cost_model, config.train.fp8)
        return plan
    config.model.check_sequence(config.batch.sequence_length)
    cost_model, target_site = cost_model or costs(config), target_site or site(config)
    check_pace_factors(target_site, config)
    target_site = target_site if config.site_file else with_known_gpus(target_site, config.plan.nodes or ())
    check_fp8(target_site, config.plan.nodes or (), cost_model, config.train.fp8)
    plan = best_plan(config.model, config.batch, target_site, config.plan, cost_model, clock)
    return replace(plan, assumptions=(*plan.assumptions, *_shared_cores(config, plan)))


def with_known_gpus(target_site: Site, pools: Collection[str]) -> Site:
    """Return the site without the pools whose GPU kind is unknown. Each omitted pool is noted in the assumptions.
    SiteError if no pool would be left, or if `pools` names an omitted pool."""
    unknown = [p for p in target_site.pools if p.gpu == replace(UNKNOWN_GPU, name=p.gpu.name)]
    hint = "ask its driver by `holmes site -o site.yaml`, or write its figures there under gpu; then give --site FILE"
    for pool in unknown:
        is_needed = pool.name in pools or len(unknown) == len(target_site.pools)
        problem = f"GPU kind {pool.gpu.name} is not known"
        SiteError.refuse(f"pool {pool.name}", (is_needed, problem, hint))
    lines = [f"{compress(p.node_names)}: left out: GPU kind {p.gpu.name} is not known; {hint}" for p in unknown]
    pools_left = tuple(pool for pool in target_site.pools if pool not in unknown)
    return replace(target_site, pools=pools_left, assumptions=(*target_site.assumptions, *lines))


def check_pace_factors(target_site: Site, config: Configuration) -> None:
    """Raise ConfigError if a key of train.pace_factors names no pool or node.
    If the site lists no node names, every key with a digit is accepted as a node name."""
    pools, nodes = [pool.name for pool in target_site.pools], {n for pool in target_site.pools for n in pool.node_names}
    for name in {*(config.train.pace_factors or {})}.difference(pools):
        is_node = nodes.issuperset(expand(name)) if nodes else any(map(str.isdigit, name))
        problem, hint = f"no pool or node {name!r}", nearest(name, pools)
        ConfigError.refuse("train.pace_factors", (not is_node, problem, hint))


def check_fp8(target_site: Site, pools: Collection[str], cost_model: Costs, recipe: str | None) -> None:
    """Raise ConfigError if training uses FP8 and a GPU kind of `pools` (empty: of all pools) has no FP8 figures, or
    cannot run the `recipe`."""
    gpus = [pool.gpu for pool in target_site.pools if not pools or pool.name in pools]
    names = sorted({gpu.name for gpu in gpus if kind(gpu).fp8_tflops is None})
    older = sorted({gpu.name for gpu in gpus if recipe == "mxfp8" and kind(gpu).generation != "blackwell"})
    is_used = cost_model.software.fp8 and not cost_model.pace_layer_ms
    hint = "leave it out, or use other pools (plan.nodes)"
    ConfigError.refuse(
        "fp8",
        (names and is_used, f"there are no FP8 figures for {', '.join(names)}", hint),
        (older and is_used, f"mxfp8 needs Blackwell GPUs, not {', '.join(older)}", "use train.fp8=delayed"),
    )


def _shared_cores(config: Configuration, plan: Plan) -> list[str]:
    """Return a list with the assumption that ranks share cores of this machine, or an empty list if they do not."""
    cores = len(os.sched_getaffinity(0))
    uses_this_cpu = config.local and config.site_file is None and plan.site.pools[0].gpu.is_cpu
    if not uses_this_cpu or plan.pace_layer_ms or plan.world_size <= cores:
        return []
    shared = f"{counted(plan.world_size, 'rank')} share {counted(cores, 'core')} of this machine"
    return [f"{shared}: steps take longer than predicted"]


def with_gpu(target_site: Site, name: str) -> Site:
    """Return the site with GPUs of kind `name` in every pool."""
    vocabulary = read_vocabulary()
    gpu = vocabulary.gpu(name)
    if gpu is None:
        known = (kind.name for _, kind in vocabulary.gpus)
        raise ConfigError(f"unknown GPU {name!r}", where="--gpu", hint=nearest(name, known))
    return replace(target_site, pools=tuple(replace(f, gpu=gpu) for f in target_site.pools))


def calibration_config(config: Configuration) -> Configuration:
    """Return `config` changed for a short run that uses every network, with few nodes and layers, and a batch that any
    data-parallel size divides. Nodes, stages and a strategy that `config` fixes are kept."""
    pools, plan, batch = site(config).pools, config.plan, config.batch
    if plan.nodes is None and not config.local:
        plan = replace(plan, nodes={f.name: min(2, f.nodes) for f in pools})
    nodes = plan.nodes or {}
    used = [f for f in pools if not nodes or f.name in nodes]
    ranks = [(nodes.get(f.name) or f.nodes) * (plan.gpus_per_node or f.gpus_per_node) for f in used]
    # A calibration measures one TP size, so all stages get that TP. It measures no all-to-alls of experts: EP is 1.
    plan = replace(plan, unequal="false", ep=1, etp=1)
    if len(used) > 1 and plan.strategy == "auto":
        plan = replace(plan, strategy="pipeline")
    if plan.pp is None and plan.strategy == "pipeline" and len(set(ranks)) == 1:
        plan = replace(plan, pp=len(used))
    layers = min(config.model.layers, 4 * max(len(used), plan.pp or 1))
    return replace(
        config,
        plan=plan,
        model=replace(config.model, layers=layers, experts=replace(config.model.experts, first_dense=0)),
        batch=replace(batch, global_size=2 * sum(ranks) * batch.micro_size),
    )


def with_software(target_site: Site, attention: str | None, fused_norm: bool | None) -> Site:
    """Return the site with these implementations of attention and norms in every pool. None: keep the pool's own.
    TRANSFORMER_ENGINE stands for the fastest attention of each GPU kind."""

    def changed(gpu: Gpu) -> Gpu:
        fastest = "softmax" if not gpu.has_bf16 else "flash3" if kind(gpu).generation == "hopper" else "flash"
        values: dict[str, Any] = {
            "attention": fastest if attention == TRANSFORMER_ENGINE else attention,
            "fused_norm": fused_norm,
        }
        return replace(gpu, **{name: value for name, value in values.items() if value is not None})

    return replace(target_site, pools=tuple(replace(pool, gpu=changed(pool.gpu)) for pool in target_site.pools))


def fitting_machine(config: Configuration, plan: Plan) -> Configuration:
    """Return `config` with as many ranks on this machine as `plan` needs, if its launcher is the local one."""
    gpus = plan.components[0].gpus_per_node
    return replace(config, plan=replace(config.plan, gpus_per_node=gpus)) if config.local else config


def check_site(plan: Plan, target_site: Site) -> None:
    """Raise PlanError for the first difference between the plan's pools and those of the site."""
    hint = "make a plan for this site with `holmes plan`, or give the plan's own site with --site FILE"
    pools = {f.name: f for f in target_site.pools}
    for component in plan.components:
        name, planned = component.pool, plan.site.pool(component.pool)
        actual, where = pools.get(name, planned), f"site {target_site.name}: pool {name}"
        problem = f"the plan needs pool {name!r} of site {plan.site.name}; this site has {', '.join(pools)}"
        PlanError.refuse(f"site {target_site.name}", (name not in pools, problem, hint))
        for key in ("nic", "partition", "constraint", "gpus_per_node"):
            old, new = getattr(planned, key), getattr(actual, key)
            problem = f"the plan was made for {key} {old or 'none'}, this site has {new or 'none'}"
            PlanError.refuse(where, (old != new, problem, hint))
        problem = f"the plan needs {component.nodes} nodes, {actual.nodes} can be used"
        PlanError.refuse(where, (component.nodes > actual.nodes, problem, hint))
        unexcluded = sorted({*expand(actual.exclude)} - {*expand(planned.exclude)})
        problem = f"the plan's jobs do not exclude nodes {compress(unexcluded)}, which this site excludes"
        PlanError.refuse(where, (unexcluded, problem, hint))
