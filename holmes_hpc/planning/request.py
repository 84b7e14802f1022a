"""From a configuration to a plan: the site that it names, what computing costs there, and the plan it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import ConfigError, HolmesError, PlanError, RecordError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.grouping import NodeSettings
from holmes_hpc.fabric.local_gpus import local_gpus
from holmes_hpc.fabric.site import CPU, Fabric, Gpu, NicType, Site
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.fabric.site_slurm import read_site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.corrections import CorrectionFit, ObservedRun, fit_corrections
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.profile import from_csv, from_sailor, is_sailor_profile
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan, fixed_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.records.files import read_text, read_yaml
from holmes_hpc.records.find import run_directories
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.schema import make

WARM_UP = 3  # steps of a run that nothing is learned from
LEARNED = 32  # runs that are learned from at most, the last ones by path


def local_site(processes: int, device: str) -> Site:
    """This machine as a site of one node that holds `processes` ranks: on its GPUs where it has as many, and `device`
    (``train.device``) is not cpu. ConfigError where it is cuda, and they are of a kind without known figures."""
    gpus: list[Gpu] = []
    try:
        gpus = local_gpus() if device != "cpu" else []
    except ConfigError:
        if device == "cuda":
            raise
    if len(gpus) >= processes:
        gpu, says = gpus[0], f"one machine, {gpus[0].name}"
    else:
        gpu, says = CPU, "one machine: its processes stand for accelerators"
    fabric = Fabric("local", NicType.ETHERNET, "local", 1, processes, ethernet_gbps=10, gpu=gpu, gres=False)
    return Site("local", (fabric,), (says,))


def given_site(site_file: str | None, settings: NodeSettings) -> Site:
    """The site of a site file; without one, what Slurm tells."""
    return read_site_file(site_file) if site_file else read_site(settings)


def site(config: Configuration) -> Site:
    """The site of a configuration: its site file, this machine for the local launcher, else what Slurm tells."""
    if config.local and not config.site_file:
        plan = config.plan
        return local_site(plan.gpus_per_node or (plan.tp or 1) * (plan.pp or 1) * (plan.dp or 1), config.train.device)
    return given_site(config.site_file, node_settings(config))


def node_settings(config: Configuration) -> NodeSettings:
    """How Slurm's nodes are to be read: the site's own vocabulary of features, and the partitions to use."""
    named = config.partitions or ()
    return NodeSettings(vocabulary=config.vocabulary, partitions=(named,) if isinstance(named, str) else tuple(named))


def costs(
    config: Configuration,
    plan: Plan | None = None,
    said: Mapping[str, Any] | None = None,
    gradient_bytes: int | None = None,
) -> Costs:
    """What computing and sending cost: a calibration file, else paced compute (as `plan` was made for, unless the
    configuration says), else published defaults; and what the run overlaps. `said`: fields of Software that are known
    otherwise."""
    path, train = config.calibration, config.train
    calibration = read_calibration(path, plan or config) if path else None
    software = make(
        Software,
        {"overlap": train.overlap_grad_reduce, "overlap_gather": train.overlap_param_gather, **(said or {})},
        "software",
    )
    return Costs(
        calibration=calibration,
        pace_layer_ms=pace(config, plan),
        software=software,
        pace_factors=train.pace_factors or (plan.pace_factors if plan else None),
        gradient_bytes=gradient_bytes,
        dtype=None if train.dtype == "auto" else train.dtype,
    )


def read_calibration(path: str, wanted: Plan | Configuration) -> Calibration:
    """The calibration of a file, or the layer profile in its place, for the model of `wanted`; ConfigError for one of
    another model."""
    try:
        if path.endswith(".csv"):
            return from_csv(read_text(path), wanted.model, wanted.batch)
        data = read_yaml(path)
        made = from_sailor(data, wanted.model, wanted.batch) if is_sailor_profile(data) else Calibration.from_dict(data)
        made.refuse_other_models(wanted.model)
        return made
    except HolmesError as e:
        raise e if e.where == path else type(e)(e.what, where=f"{path}: {e.where}", hint=e.hint) from e


def pace(config: Configuration, plan: Plan | None) -> float | None:
    """Milliseconds that a layer is paced to: as the configuration says, else as `plan` was made for."""
    said = config.train.pace_layer_ms
    return said if said is not None or plan is None else plan.pace_layer_ms


def learned(config: Configuration, root: str) -> tuple[CorrectionFit, list[str]]:
    """What the runs at or below `root` say of the planner's figures (with the calibration of `config`, if it names
    one); and why the others say nothing. ConfigError where none of them says anything."""
    runs, others = list[ObservedRun](), list[str]()
    for record in run_directories(root):
        try:
            runs.append(_observed(record, config.calibration))
        except (HolmesError, KeyError, TypeError, ValueError, AttributeError) as e:
            others.append(f"{record.name}: {e if isinstance(e, HolmesError) else 'its record lacks something'}")
    if not runs:
        raise ConfigError(
            "no run to learn from" + (f" ({others[0]})" if others else ""),
            where=f"--learn {root}",
            hint=f"give a directory with runs of at least {WARM_UP + 2} steps",
        )
    return fit_corrections(runs[-LEARNED:]), others


def _observed(record: RunDirectory, calibration: str | None) -> ObservedRun:
    """A run as its record has it: its plan, and the medians of the latest attempt's steps after warm-up."""
    config, plan = recorded(record.config)[0], Plan.read(record.plan_path)
    if plan.is_per_stage:
        raise RecordError("its stages have unequal widths", where=str(record.path), hint="learn from equal ones")
    lines = record.metrics()
    last = max((int(line.get("attempt") or 1) for line in lines), default=1)
    kept = [line for line in lines if int(line.get("attempt") or 1) == last][WARM_UP:]
    if len(kept) < 2:
        raise RecordError(f"fewer than {WARM_UP + 2} steps", where=str(record.path), hint="let it run longer")
    computed = zip(*([float(stage["compute_s"]) for stage in line["breakdown"]] for line in kept), strict=True)
    return ObservedRun(
        record.name,
        plan,
        costs(replace(config, calibration=calibration), plan),
        median(float(line["step_time_s"]) for line in kept),
        tuple(median(stage) for stage in computed),
    )


def make_plan(
    config: Configuration, on: Site | None = None, clock: Clock | None = None, known: Costs | None = None
) -> Plan:
    """The plan that `config` names, or the best one for its model and site by `known` (else the configuration's costs);
    `clock` as for :func:`best_plan`."""
    if config.plan_file:
        return Plan.read(config.plan_file)
    return best_plan(config.model, config.batch, on or site(config), config.plan, known or costs(config), clock)


def given_layout(config: Configuration, on: Site | None = None, known: Costs | None = None) -> Plan:
    """The plan of the one layout that the group `plan` of `config` gives, whether it fits or not, on `on` (else the
    configuration's site), judged by `known` (else the configuration's costs)."""
    return fixed_plan(config.model, config.batch, on or site(config), config.plan, known or costs(config))


def with_gpu(on: Site, name: str) -> Site:
    """`on` with GPUs of the kind that `name` names, in every fabric."""
    gpu = read_vocabulary().gpu(name)
    if gpu is None:
        raise ConfigError(
            f"unknown GPU {name!r}",
            where="--gpu",
            hint="use a kind of holmes_hpc/fabric/gpu_kinds.yaml,"
            " such as a100-80gb or h100; others have their figures in the site file",
        )
    return replace(on, fabrics=tuple(replace(f, gpu=gpu) for f in on.fabrics))


def for_calibration(config: Configuration) -> Configuration:
    """`config` for a short run that uses every network: two nodes of each fabric, a stage on each, few layers, and a
    batch that fits any number of data-parallel ranks. What the configuration fixes itself stays."""
    here, plan, batch = site(config), config.plan, config.batch
    if plan.nodes is None and not config.local:
        plan = replace(plan, nodes={f.name: min(2, f.nodes) for f in here.fabrics})
    used = [f for f in here.fabrics if not plan.nodes or f.name in plan.nodes]
    ranks = [((plan.nodes or {}).get(f.name) or f.nodes) * (plan.gpus_per_node or f.gpus_per_node) for f in used]
    plan = replace(plan, unequal="false")  # what is measured is measured at one TP
    if len(used) > 1 and plan.strategy == "auto":
        plan = replace(plan, strategy="pipeline")
    if plan.pp is None and plan.strategy == "pipeline" and len(set(ranks)) == 1:
        plan = replace(plan, pp=len(used))
    layers = min(config.model.layers, 4 * max(len(used), plan.pp or 1))
    return replace(
        config,
        plan=plan,
        model=replace(config.model, layers=layers),
        batch=replace(batch, global_size=2 * sum(ranks) * batch.micro_size),
    )


def with_software(on: Site, attention: str | None, fused_norm: bool | None) -> Site:
    """`on` with GPUs on which the software does this, where it is not None, in every fabric."""
    return replace(
        on,
        fabrics=tuple(
            replace(
                f,
                gpu=replace(
                    f.gpu,
                    attention=attention or f.gpu.attention,
                    fused_norm=f.gpu.fused_norm if fused_norm is None else fused_norm,
                ),
            )
            for f in on.fabrics
        ),
    )


def check_site(plan: Plan, on: Site) -> None:
    """Refuse a plan whose fabrics are not those of `on`; the error names the first difference."""
    hint = "make a plan for this site with `holmes plan`, or give the plan's own with --site FILE"
    here = {f.name: f for f in on.fabrics}
    for part in plan.components:
        was, where = plan.site.fabric(part.fabric), f"site {on.name}: fabric {part.fabric}"
        now = here.get(part.fabric, was)
        PlanError.refuse(
            (
                part.fabric not in here,
                f"the plan is for site {plan.site.name}, whose fabric {part.fabric!r} is not here "
                f"(here: {', '.join(here)})",
                f"site {on.name}",
                hint,
            ),
            *(
                (
                    getattr(was, name) != getattr(now, name),
                    f"the plan was made for {name} {getattr(was, name)}, here it is {getattr(now, name)}",
                    where,
                    hint,
                )
                for name in ("nic", "partition", "constraint", "gpus_per_node")
            ),
            (part.nodes > now.nodes, f"the plan wants {part.nodes} nodes, {now.nodes} can be used", where, hint),
        )
