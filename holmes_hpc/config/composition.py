"""Composition of a configuration: overrides in Hydra's grammar, applied to the defaults or a recorded configuration.
Overrides of declared options are composed without Hydra, because its file search takes most of the time."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from holmes_hpc.config.configuration import GROUPS, Configuration, from_dict
from holmes_hpc.config.flags import FLAGS, SWITCH_VALUES
from holmes_hpc.config.group_options import DEFAULTS, named_option_hint, option, unknown_key
from holmes_hpc.config.hugging_face import folder_of, read_model
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import BATCHES, gpt_of_sizes
from holmes_hpc.config.other_names import unsupported_hint
from holmes_hpc.errors import ConfigError, HolmesError, nearest, raise_all
from holmes_hpc.records.files import map_leaves, read_yaml
from holmes_hpc.schema import keys

QUOTABLE = {"{": "{a: 1, b: 2}", "[": "[1, 2]"}  # a shell splits such values unless they are quoted
_UNQUOTED_TEXT = re.compile(r"\A(?:(\+*name=)([-+]?[0-9][\w.+-]*)|(\+*data\.split=)([0-9.,]+))\Z")
_FIXED_BY_PLAN = re.compile(r"[+~]*(model|batch|plan)[.=@]")


def load(overrides: Sequence[str] = (), *, nameless: bool = False) -> Configuration:
    """Compose and check the configuration of `overrides` (``model=gpt_3_6b train.steps=5``). If no site file is set,
    use the one that HOLMES_SITE names, except with the local launcher. `nameless`: if no model is named, model sizes in
    `overrides` define a GPT; if False, they change the default model."""
    data, keys = composed(overrides), [override.lstrip("+").partition("=")[0] for override in overrides]
    if nameless and not {"model", "plan_file"} & {*keys} and any(key.startswith("model.") for key in keys):
        data |= gpt_of_sizes(data, keys)
    config = from_dict(data)
    if config.site_file is None and not config.local:
        config = replace(config, site_file=os.environ.get("HOLMES_SITE") or None)
    return config


def composed(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Apply `overrides` to the defaults. Return the configuration as plain data whose values are not checked yet.
    Raise ConfigError for an unknown key, or if Hydra refuses an override."""
    expanded = for_hydra(overrides)
    with _as_config_error():
        parsed = _parse(expanded)
        raise_all([*_unknown_keys(parsed)])
        config = _compose_declared(parsed)
        if config is None:  # it has undeclared options
            config = _compose_by_hydra(expanded)
        return _to_plain(config, overrides)


def with_overrides(config: Configuration, overrides: Sequence[str]) -> Configuration:
    """Apply `overrides` to a recorded configuration, and return the result.
    An override may set a key (``data.prefix=x``) or replace a whole group (``data=indexed``)."""
    # OmegaConf must keep `${` literally, e.g. in a shell's ${HOME}.
    literal = map_leaves(config.to_dict(), lambda v: v.replace("${", "\\${") if isinstance(v, str) else v)
    result, defaults = OmegaConf.create(literal), OmegaConf.create(composed())
    OmegaConf.set_struct(result, True)
    with _as_config_error():
        parsed = _parse(for_hydra(overrides))
        for override in parsed:
            key, line = str(override.key_or_group), str(override.input_line)
            if override.is_delete() or override.is_sweep_override():
                raise ConfigError(f"{line!r} sets no value", where="overrides", hint="write KEY=VALUE")
            if key in GROUPS:
                group_overrides = [str(o.input_line) for o in parsed if re.match(rf"\+*{key}[.=]", str(o.input_line))]
                group_overrides += [] if key == "batch" else ["batch=tiny"]  # composing needs a batch; it is not used
                OmegaConf.update(result, key, composed(group_overrides)[key], merge=False, force_add=True)
            else:
                is_known = OmegaConf.select(defaults, key, default=...) is not ...
                try:
                    OmegaConf.update(result, key, override.value(), force_add=override.is_add() or is_known)
                except (AttributeError, KeyError) as e:
                    raise unknown_key(key) from e
        return resolve(result, overrides)


def resolve(config: DictConfig, overrides: Sequence[str] = ()) -> Configuration:
    """Return the checked configuration of `config`, which Hydra composed from `overrides`."""
    return from_dict(_to_plain(config, overrides))


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` in the form that Hydra needs: with a registered model in place of each ``hf:DIR``, and with
    quoted numbers after ``name=`` and ``data.split=``, because Hydra would convert ``name=1e5`` to 100000.0. Raise
    DataError if config.json is unreadable or its model is not supported."""
    result = []
    for override in overrides:
        match = re.match(r"(\+*model=)(['\"]?)(hf:.+)\2\Z", override)
        folder = folder_of(match[3]) if match else None
        if match and folder is not None:
            name = "hf_" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
            ConfigStore.instance().store(group="model", name=name, node=asdict(read_model(folder)))
            override = match[1] + name
        result.append(_UNQUOTED_TEXT.sub(r"\1\3'\2\4'", override))
    return result


def with_flags(flags: Mapping[str, Any], overrides: Sequence[str] | None) -> list[str]:
    """Return `flags` (name -> value, declared in config/flags.py) and `overrides` as overrides.
    Raise ConfigError if both set a key to different values, or if a value follows a switch."""
    flag_overrides = {name: FLAGS[name].override(value) for name, value in flags.items()}
    for switch in [name for name in flags if FLAGS[name].is_switch]:
        values = [word for word in overrides or () if word in SWITCH_VALUES]
        hint = f"write {switch}, or --no-{switch.strip('-')}"
        ConfigError.refuse(switch, (values, f"it takes no value, but {' '.join(values)!r} follows", hint))
    for override in overrides or ():
        key = override.lstrip("+").partition("=")[0]
        for name in [n for n in flag_overrides if _changes(key, FLAGS[n].key)]:
            with _as_config_error():
                (first,), (second,) = _parse([flag_overrides[name]]), _parse([override])
            if first.key_or_group != second.key_or_group or first.value() != second.value():
                problem = f"{name} {flags[name]} and {override} differ"
                raise ConfigError(problem, where="overrides", hint="give one of them")
            del flag_overrides[name]
    return [*flag_overrides.values(), *(overrides or ())]


def is_fixed_by_plan(override: str) -> bool:
    """Return whether an override sets the group model, batch or plan, or a key in one of them. A plan fixes these."""
    return _FIXED_BY_PLAN.match(override) is not None


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override of a key that the plan fixes."""
    for override in filter(is_fixed_by_plan, overrides):
        hint = "make a plan with it: `holmes plan … -o FILE` (`holmes resume RUN --plan FILE`)"
        raise ConfigError(f"{override!r} is fixed by the plan", where="overrides", hint=hint)


def explained(error: Exception) -> ConfigError:
    """Return a ConfigError, with a hint, for an error of Hydra or OmegaConf."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, where = lines[0] if lines else str(error), "overrides"
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    if values := re.search(r"Ambiguous value for argument '(?P<key>[^=]+)=", first):
        hint = "give one; the value of a list is quoted: 'KEY=[1, 2]'; a sweep needs `holmes-train -m`"
        return ConfigError(f"{values['key']} has several values", where=where, hint=f"{hint} (docs/howto.md)")
    if missing := re.search(r"Could not find '(\w+)/([^']+)'", str(error)):
        listing = str(error).partition("Available options")[2].partition("Config search path")[0].splitlines()[1:]
        hint = unsupported_hint(missing[2]) or nearest(missing[2], filter(None, map(str.strip, listing)))
        return ConfigError(f"no {missing[1]} {missing[2]!r}", where=where, hint=hint)
    bare = re.match(r"Error parsing override '([^'=]+)'", first)
    if bare and Path(bare[1]).is_file():
        kind, option = _kind_of_file(bare[1])
        return ConfigError(f"{kind}, not KEY=VALUE", where=bare[1], hint=f"write {option}={bare[1]}")
    if bare and (text := unsupported_hint(bare[1]) or named_option_hint(bare[1])):
        return ConfigError(f"{bare[1]!r} is not KEY=VALUE", where=where, hint=text)
    hint = "write KEY=VALUE; quote a value with special characters: \"KEY='VALUE'\""
    if unquoted := re.search(r"no viable alternative at input '([{\[])", str(error)):
        hint = f"quote the whole word, or the shell splits it: 'KEY={QUOTABLE[unquoted[1]]}'"
    elif not ("grammar" in str(error) or "Lexer" in str(error) or "override" in type(error).__name__.lower()):
        return ConfigError(" ".join(lines[:12]) or type(error).__name__, where=where, hint="write KEY=VALUE")
    return ConfigError(f"cannot be read: {first}", where=where, hint=hint)


def _kind_of_file(path: str) -> tuple[str, str]:
    """Return the kind of the file at `path` (such as "a plan"), and the configuration key for such a file."""
    content: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        content = read_yaml(path)
    if "stages" in content:
        return "a plan", "plan_file"
    return ("a site file", "site_file") if "fabrics" in content else ("a file", "KEY")


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    """Re-raise errors of Hydra and OmegaConf as ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as e:
        raise explained(e) from e


def _parse(overrides: Sequence[str]) -> list[Any]:
    return list(OverridesParser.create().parse_overrides(list(overrides)))


def _changes(key: str, changed_key: str) -> bool:
    """Return whether an override of `key` sets `changed_key`, or an entry of it (``plan.nodes.ib-a``)."""
    return key == changed_key or (key.startswith(f"{changed_key}.") and changed_key not in GROUPS)


def _unknown_keys(overrides: Sequence[Any]) -> Iterator[HolmesError]:
    """Yield an error for each undeclared key, except additions, deletions, and keys of the group hydra, and for each
    group with a value that is no name."""
    for o in overrides:
        if o.key_or_group in GROUPS and isinstance(o.value(), int | float | None):
            problem, hint = f"{o.input_line} is no name of a group", f"write {o.key_or_group}.KEY=VALUE"
            yield ConfigError(problem, where=o.key_or_group, hint=hint)
        group, _, name = str(o.key_or_group).partition(".")
        first = name.partition(".")[0] if group in GROUPS else group
        is_declared = not first or first in keys(GROUPS.get(group, Configuration))
        if not (is_declared or group == "hydra" or o.is_add() or o.is_force_add() or o.is_delete()):
            yield unknown_key(str(o.key_or_group))


def _compose_declared(overrides: Sequence[Any]) -> DictConfig | None:
    """Compose parsed `overrides` without Hydra. Return None if Hydra must compose them, because one of them names an
    undeclared option or group (``+sweep=ablation``), deletes a key, is a sweep, or cannot be applied."""
    groups = [o for o in overrides if o.key_or_group in GROUPS]
    names = {group: name for group, name in DEFAULTS.items() if group in GROUPS}
    names |= {o.key_or_group: str(o.value()) for o in groups}
    names.setdefault("batch", names["model"])
    options = {group: option(group, name) for group, name in names.items()}
    if (
        None in options.values()
        or len({o.key_or_group for o in groups}) < len(groups)
        or any(o.is_add() or o.is_force_add() for o in groups)
        or any(o.is_delete() or o.is_sweep_override() or o.package for o in overrides)
        or any(o.key_or_group.partition(".")[0] not in keys(Configuration) for o in overrides)
    ):
        return None
    config = OmegaConf.create({**{k: d.default for k, d in keys(Configuration).items() if k not in GROUPS}, **options})
    OmegaConf.set_struct(config, True)
    try:
        for o in overrides:
            if o.is_add() and OmegaConf.select(config, o.key_or_group) is not None:
                return None
            if o not in groups:
                OmegaConf.update(config, o.key_or_group, o.value(), force_add=o.is_add() or o.is_force_add())
    except OmegaConfBaseException:
        return None
    return config


def _compose_by_hydra(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration that Hydra composes from `overrides` and the files under generated_conf/."""
    GlobalHydra.instance().clear()
    base = VersionBase.instance()
    previous_version = base.version_base  # this process may itself be a Hydra application
    try:
        with initialize_config_module("holmes_hpc.generated_conf", version_base="1.3"):
            return compose("config", overrides=list(overrides))
    finally:
        base.version_base = previous_version


def _to_plain(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a composed configuration as plain data, without Hydra's section. Raise ConfigError for a missing value."""
    if any(OmegaConf.is_missing(config.batch, name) for name in keys(Batch)):
        raise _no_batch(str(config.model.name), overrides)
    without_hydra = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    try:
        data = OmegaConf.to_container(without_hydra, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as e:
        problem = f"{e.full_key} is missing" if isinstance(e, MissingMandatoryValue) else str(e).splitlines()[0]
        raise ConfigError(problem, where="configuration", hint="give it as KEY=VALUE") from e
    assert isinstance(data, dict)
    return {str(k): v for k, v in data.items()}


def _no_batch(model: str, overrides: Sequence[str]) -> ConfigError:
    """Return the error for a missing batch: either its name is unknown, or the model has no default batch."""
    batch_names = [override.partition("=")[2] for override in overrides if override.startswith("batch=")]
    if batch_names and batch_names[-1] not in BATCHES:
        return ConfigError(f"no batch {batch_names[-1]!r}", where="overrides", hint=nearest(batch_names[-1], BATCHES))
    set_keys = {override.partition("=")[0] for override in overrides}
    options = {flag.key: name for name, flag in FLAGS.items()}
    needed = [f"batch.{name}" for name in ("global_size", "sequence_length")]
    missing = " and ".join(f"{key} ({options[key]})" for key in needed if key not in set_keys)
    return ConfigError(f"model {model} has no default batch", where="batch", hint=f"give {missing}, or batch=NAME")
