"""The configuration of a run: composed by Hydra, checked against what exists, turned into the rooms' nouns."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import ConfigError, HolmesError, PlanError, nearest
from holmes_hpc.fabric.grouping import NodeSettings
from holmes_hpc.fabric.site import CPU, Fabric, NicType, Site
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.fabric.site_slurm import read_site
from holmes_hpc.planning.cost.costs import Calibration, Costs, Software
from holmes_hpc.planning.search.best import best_plan, given_plan
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.find import runs_root
from holmes_hpc.records.run import RunDirectory

VERSIONS = ("holmes-hpc", "torch", "megatron-core", "submitit", "hydra-core", "numpy")


def load(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose the configuration with Hydra `overrides` (``model=gpt_3_6b train.steps=5``); plain data comes back."""
    GlobalHydra.instance().clear()
    base = VersionBase.instance()
    before = base.version_base  # of a Hydra application that this process may be: ours is not to change it
    try:
        with initialize_config_module("holmes_hpc.conf", version_base="1.3"):
            return resolve(compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as e:
        raise explained(e) from e
    finally:
        base.version_base = before


def applied(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A recorded configuration with more `overrides`: single keys, or whole groups (``data=indexed data.prefix=x``)."""
    made, defaults = OmegaConf.create(_literal(dict(config))), OmegaConf.create(load())
    OmegaConf.set_struct(made, True)
    groups = [p.name for p in files("holmes_hpc.conf").iterdir() if p.is_dir()]
    key = ""
    try:
        found = OverridesParser.create().parse_overrides(list(overrides))
        for one in found:
            key = str(one.key_or_group)
            if one.is_delete() or one.is_sweep_override():
                raise ConfigError(f"{one.input_line!r} sets no value", where="overrides", hint="write KEY=VALUE")
            if key in groups:
                words = [str(o.input_line) for o in found if re.match(rf"\+*{key}[.=]", str(o.input_line))]
                OmegaConf.update(made, key, load(words)[key], merge=False, force_add=True)
            else:
                known = OmegaConf.select(defaults, key, default=found) is not found
                OmegaConf.update(made, key, one.value(), force_add=one.is_add() or known)
    except (HydraException, OmegaConfBaseException) as e:
        raise explained(HydraException(f"Could not override '{key}'") if "not in struct" in str(e) else e) from e
    return resolve(made)


def _literal(value: Any) -> Any:
    """Plain data whose text OmegaConf takes as it is: what was resolved once may hold a shell's ``${HOME}``."""
    if isinstance(value, dict):
        return {key: _literal(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def explained(error: Exception) -> ConfigError:
    """Hydra's error as one line; for an unknown key, the nearest known one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown:
        known = sorted(_keys(load()))
        return ConfigError(f"unknown key {unknown[1]!r}", where="overrides", hint=nearest(unknown[1], known))
    option = re.search(r"Could not find '(\w+)/([^']+)'", str(error))
    if option:
        known = [line.strip() for line in _options(str(error))]
        return ConfigError(f"no {option[1]} {option[2]!r}", where="overrides",
                           hint=nearest(option[2], filter(None, known)))
    if "grammar" in str(error) or "Lexer" in str(error) or "override" in type(error).__name__.lower():
        return ConfigError(f"cannot be read: {lines[0] if lines else error}", where="overrides",
                           hint="write KEY=VALUE; a value with other than plain characters needs quotes of its own: "
                                "\"KEY='VALUE'\"")
    return ConfigError(" ".join(lines[:12]) or type(error).__name__, where="overrides", hint="write KEY=VALUE")


def _options(message: str) -> list[str]:
    """The lines of Hydra's list of a group's options."""
    return message.partition("Available options")[2].partition("Config search path")[0].splitlines()[1:]


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def resolve(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain data, without Hydra's own part; a value that is still missing is an error."""
    kept = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    try:
        data = OmegaConf.to_container(kept, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as e:
        raise ConfigError(str(e).splitlines()[0], where="configuration", hint="give it as KEY=VALUE") from e
    assert isinstance(data, dict)
    _check_train(data["train"])
    return {str(k): v for k, v in data.items()}


def _check_train(train: Mapping[str, Any]) -> None:
    for key, low in (("steps", 1), ("log_interval", 1), ("checkpoint_interval", 0), ("checkpoint_keep", 1),
                     ("max_restarts", 0), ("eval_interval", 0), ("eval_steps", 1)):
        value = train[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"train.{key} is {value!r}", where="configuration", hint=f"use a whole number from {low}")
    for key in ("lr", "min_lr", "weight_decay", "beta1", "beta2", "eps", "clip_grad", "watchdog_s", "net_timeout_s"):
        value = train[key]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise ConfigError(f"train.{key} is {value!r}", where="configuration", hint="use a number from 0")
    for key in ("overlap_grad_reduce", "overlap_param_gather", "checkpoint_async", "trace", "tensorboard", "measure"):
        if not isinstance(train[key], bool):
            raise ConfigError(f"train.{key} is {train[key]!r}", where="configuration", hint="use true or false")
    for key, known in (("device", ("auto", "cpu", "cuda")), ("dtype", ("auto", "fp32", "bf16", "fp16"))):
        if train[key] not in known:
            raise ConfigError(f"train.{key} is {train[key]!r}", where="configuration", hint=f"use {', '.join(known)}")
    pace = train["pace_layer_ms"]
    if pace is not None and (not isinstance(pace, (int, float)) or pace <= 0):
        raise ConfigError(f"train.pace_layer_ms is {pace!r}", where="configuration", hint="use milliseconds above 0")


def build(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Make dataclass `cls` from a configuration group; unknown and missing keys are named."""
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}", where=where, hint=nearest(str(key), known))
    try:
        return cls(**values)
    except (TypeError, ValueError) as e:
        if isinstance(e, HolmesError):
            raise
        raise ConfigError(str(e).replace(f"{cls.__name__}.__init__() ", ""), where=where, hint="correct it") from e


def model(config: Mapping[str, Any]) -> ModelSpec:
    spec: ModelSpec = build(ModelSpec, config["model"], "model")
    return spec


def batch(config: Mapping[str, Any]) -> Batch:
    made: Batch = build(Batch, config["batch"], "batch")
    return made


def read_yaml(path: str) -> dict[str, Any]:
    """A YAML mapping from a file, safely loaded."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(e.strerror or str(e), where=path, hint="give an existing file") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"not YAML: {' '.join(str(e).split())}", where=path, hint="correct it") from e
    if not isinstance(data, dict):
        raise ConfigError("not a mapping of keys to values", where=path, hint="correct it")
    return data


def local_site(processes: int) -> Site:
    """This machine as a site of one node that holds `processes` ranks."""
    fabric = Fabric("local", NicType.ETHERNET, "local", 1, processes, ethernet_gbps=10, gpu=CPU, gres=False)
    return Site("local", (fabric,), ("one machine: its processes stand for accelerators",))


def site(config: Mapping[str, Any]) -> Site:
    """The site of a configuration: its site file, this machine for the local launcher, else what Slurm tells."""
    if config["site_file"]:
        return read_site_file(config["site_file"])
    if config["launcher"]["kind"] == "local":
        return local_site(_local_ranks(config["plan"]))
    return read_site(node_settings(config))


def node_settings(config: Mapping[str, Any]) -> NodeSettings:
    """How Slurm's nodes are to be read: the site's own vocabulary of features, and the partitions to use."""
    named = config.get("partitions") or ()
    return NodeSettings(vocabulary=config["vocabulary"],
                        partitions=(named,) if isinstance(named, str) else tuple(named))


def _local_ranks(plan: Mapping[str, Any]) -> int:
    return int(plan["gpus_per_node"] or (plan["tp"] or 1) * (plan["pp"] or 1) * (plan["dp"] or 1))


def costs(config: Mapping[str, Any], plan: Plan | None = None) -> Costs:
    """What computing and sending cost: a calibration file, else paced compute (as `plan` was made for, unless the
    configuration says), else published defaults; and what the run overlaps."""
    path = config["calibration"]
    try:
        calibration = Calibration.from_dict(read_yaml(path)) if path else None
    except ConfigError as e:
        raise e if e.where == path else ConfigError(e.what, where=f"{path}: {e.where}", hint=e.hint) from e
    train = config["train"]
    software = Software(overlap=train["overlap_grad_reduce"], overlap_gather=train["overlap_param_gather"])
    return Costs(calibration=calibration, pace_layer_ms=_pace(config, plan), software=software,
                 dtype=None if train["dtype"] == "auto" else train["dtype"])


def _pace(config: Mapping[str, Any], plan: Plan | None) -> float | None:
    pace: float | None = config["train"]["pace_layer_ms"]
    return pace if pace is not None or plan is None else plan.pace_layer_ms


def make_plan(config: Mapping[str, Any], on: Site | None = None) -> Plan:
    """The plan that `config` names, or the best one for its model and site."""
    if config["plan_file"]:
        return Plan.read(config["plan_file"])
    options: PlanOptions = build(PlanOptions, config["plan"], "plan")
    return best_plan(model(config), batch(config), on or site(config), options, costs(config))


def given_layout(config: Mapping[str, Any]) -> Plan:
    """The plan of the one layout that the group `plan` of `config` gives, whether it fits or not."""
    options: PlanOptions = build(PlanOptions, config["plan"], "plan")
    return given_plan(model(config), batch(config), site(config), options, costs(config))


def for_calibration(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` for a short run that uses every network: two nodes of each fabric, a stage on each, few layers, and a
    batch that fits any number of data-parallel ranks. What the configuration fixes itself stays."""
    here = site(config)
    plan = dict(config["plan"])
    if plan["nodes"] is None and config["launcher"]["kind"] != "local":
        plan["nodes"] = {f.name: min(2, f.nodes) for f in here.fabrics}
    used = [f for f in here.fabrics if not plan["nodes"] or f.name in plan["nodes"]]
    ranks = [(plan["nodes"] or {}).get(f.name, f.nodes) * (plan["gpus_per_node"] or f.gpus_per_node) for f in used]
    if len(used) > 1 and plan["strategy"] == "auto":
        plan["strategy"] = "pipeline"
    if plan["pp"] is None and plan["strategy"] == "pipeline" and len(set(ranks)) == 1:
        plan["pp"] = len(used)
    layers = min(config["model"]["layers"], 4 * max(len(used), plan["pp"] or 1))
    return {**config, "plan": plan, "model": {**config["model"], "layers": layers},
            "batch": {**config["batch"], "global_size": 2 * sum(ranks) * config["batch"]["micro_size"]}}


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse what a given plan has fixed already: another model, batch or layout."""
    for override in overrides:
        if re.match(r"[+~]*(model|batch|plan)[.=@]", override):
            raise ConfigError(f"{override!r} is fixed by the plan", where="overrides",
                              hint="make a plan with it: `holmes plan … -o plan.yaml`")


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


def new_run_path(config: Mapping[str, Any], plan: Plan) -> Path:
    """Where a new run's directory will be: `run_dir`, or `name` (else time, model and plan) under the runs' root."""
    given = config["name"]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.model.name}-{plan.id[:6]}" if given is None else str(given)
    if not name or "/" in name or name in (".", "..") or len(name.encode()) > 200:
        raise ConfigError(f"name is {name[:80]!r}", where="configuration",
                          hint="use 1 to 200 characters without '/', or give run_dir=PATH")
    path = Path(config["run_dir"]) if config["run_dir"] else runs_root() / name
    path = path.absolute()
    if "%" in str(path) or not str(path).isprintable():
        raise ConfigError(f"the run directory is {str(path)!r}", where="configuration",
                          hint="leave out '%', which Slurm gives a meaning of its own, and control characters")
    return path


def new_run(config: Mapping[str, Any], plan: Plan, overrides: Sequence[str], alone: bool = False) -> RunDirectory:
    """Make the run directory of a new run. `alone`: ConfigError where other files are in it."""
    path = new_run_path(config, plan)
    if alone and path.is_dir() and not RunDirectory(path).exists() and any(path.iterdir()):
        raise ConfigError("other files are there", where=str(path), hint="give the run a directory of its own")
    filled = {**config, "run_dir": str(path), "plan_file": str(path / "plan.yaml")}
    return RunDirectory.create(path, plan_text=plan.to_yaml(), config=filled, overrides=list(overrides),
                               plan_id=plan.id, components=plan.layout, pace_layer_ms=_pace(config, plan),
                               versions=versions(), git_commit=git_commit())


def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    found = {}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, `+` when changed; None where it is no checkout."""
    def git(*words: str) -> str:
        at = os.path.dirname(os.path.abspath(__file__))
        return subprocess.run(["git", "-C", at, *words], capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
