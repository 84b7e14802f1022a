"""From a configuration to a plan: the site that it names, what computing costs there, and the plan it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holmes_hpc.config.configuration import Configuration
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.grouping import NodeSettings
from holmes_hpc.fabric.local_gpus import local_gpus
from holmes_hpc.fabric.site import CPU, Fabric, NicType, Site
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.fabric.site_slurm import read_site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.search.best import best_plan, given_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import make


def local_site(processes: int, device: str) -> Site:
    """This machine as a site of one node that holds `processes` ranks: on its GPUs where it has as many, and `device`
    (``train.device``) is not cpu."""
    gpus = local_gpus() if device != "cpu" else []
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


def costs(config: Configuration, plan: Plan | None = None, said: Mapping[str, Any] | None = None,
          gradient_bytes: int | None = None) -> Costs:
    """What computing and sending cost: a calibration file, else paced compute (as `plan` was made for, unless the
    configuration says), else published defaults; and what the run overlaps. `said`: fields of Software that are known
    otherwise."""
    path, train = config.calibration, config.train
    try:
        calibration = Calibration.from_dict(read_yaml(path)) if path else None
    except ConfigError as e:
        raise e if e.where == path else ConfigError(e.what, where=f"{path}: {e.where}", hint=e.hint) from e
    software = make(Software, {"overlap": train.overlap_grad_reduce, "overlap_gather": train.overlap_param_gather,
                               **(said or {})}, "software")
    return Costs(calibration=calibration, pace_layer_ms=pace(config, plan), software=software,
                 gradient_bytes=gradient_bytes, dtype=None if train.dtype == "auto" else train.dtype)


def pace(config: Configuration, plan: Plan | None) -> float | None:
    """Milliseconds that a layer is paced to: as the configuration says, else as `plan` was made for."""
    said = config.train.pace_layer_ms
    return said if said is not None or plan is None else plan.pace_layer_ms


def make_plan(config: Configuration, on: Site | None = None, clock: Clock | None = None) -> Plan:
    """The plan that `config` names, or the best one for its model and site; `clock` as for :func:`best_plan`."""
    if config.plan_file:
        return Plan.read(config.plan_file)
    return best_plan(config.model, config.batch, on or site(config), config.plan, costs(config), clock)


def given_layout(config: Configuration, on: Site | None = None, known: Costs | None = None) -> Plan:
    """The plan of the one layout that the group `plan` of `config` gives, whether it fits or not, on `on` (else the
    configuration's site), judged by `known` (else the configuration's costs)."""
    return given_plan(config.model, config.batch, on or site(config), config.plan, known or costs(config))


def with_gpu(on: Site, name: str) -> Site:
    """`on` with GPUs of the kind that `name` names, in every fabric."""
    gpu = read_vocabulary().gpu(name)
    if gpu is None:
        raise ConfigError(f"unknown GPU {name!r}", where="--gpu", hint="use a kind of holmes_hpc/fabric/gpu_kinds.yaml,"
                          " such as a100-80gb or h100; others have their figures in the site file")
    return replace(on, fabrics=tuple(replace(f, gpu=gpu) for f in on.fabrics))


def for_calibration(config: Configuration) -> Configuration:
    """`config` for a short run that uses every network: two nodes of each fabric, a stage on each, few layers, and a
    batch that fits any number of data-parallel ranks. What the configuration fixes itself stays."""
    here, plan, batch = site(config), config.plan, config.batch
    if plan.nodes is None and not config.local:
        plan = replace(plan, nodes={f.name: min(2, f.nodes) for f in here.fabrics})
    used = [f for f in here.fabrics if not plan.nodes or f.name in plan.nodes]
    ranks = [((plan.nodes or {}).get(f.name) or f.nodes) * (plan.gpus_per_node or f.gpus_per_node) for f in used]
    if len(used) > 1 and plan.strategy == "auto":
        plan = replace(plan, strategy="pipeline")
    if plan.pp is None and plan.strategy == "pipeline" and len(set(ranks)) == 1:
        plan = replace(plan, pp=len(used))
    layers = min(config.model.layers, 4 * max(len(used), plan.pp or 1))
    return replace(config, plan=plan, model=replace(config.model, layers=layers),
                   batch=replace(batch, global_size=2 * sum(ranks) * batch.micro_size))


def check_site(plan: Plan, on: Site) -> None:
    """Refuse a plan whose fabrics are not those of `on`; the error names the first difference."""
    hint = "make a plan for this site with `holmes plan`"
    names = [f.name for f in on.fabrics]
    for part in plan.components:
        was = plan.site.fabric(part.fabric)
        if part.fabric not in names:
            raise PlanError(f"the plan is for site {plan.site.name}, whose fabric {part.fabric!r} is not here "
                            f"(here: {', '.join(names)})", where=f"site {on.name}", hint=hint)
        now = on.fabric(part.fabric)
        for what in ("nic", "partition", "constraint", "gpus_per_node"):
            if getattr(was, what) != getattr(now, what):
                raise PlanError(f"the plan was made for {what} {getattr(was, what)}, here it is {getattr(now, what)}",
                                where=f"site {on.name}: fabric {part.fabric}", hint=hint)
        if part.nodes > now.nodes:
            raise PlanError(f"the plan wants {part.nodes} nodes, {now.nodes} can be used",
                            where=f"site {on.name}: fabric {part.fabric}", hint=hint)
