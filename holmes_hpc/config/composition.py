"""Compose the configuration of overrides, in Hydra's grammar: from the defaults, or on top of a recorded one.

The declared options of each group are read without Hydra, whose search for files takes longer than all else; files
of a user's own search path are left to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from holmes_hpc.config.configuration import GROUPS, Configuration, from_dict
from holmes_hpc.config.flags import FLAGS
from holmes_hpc.config.hugging_face import folder_of, read_model
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import BATCHES
from holmes_hpc.config.options import DEFAULTS, option, unknown_key
from holmes_hpc.config.options import meant as meant_override
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.schema import keys

QUOTABLE = {"{": "{a: 1, b: 2}", "[": "[1, 2]"}  # values that a shell splits unless they are quoted
_FIXED_BY_PLAN = re.compile(r"[+~]*(model|batch|plan)[.=@]")


def load(overrides: Sequence[str] = ()) -> Configuration:
    """Compose and check the configuration of `overrides` (``model=gpt_3_6b train.steps=5``)."""
    return from_dict(composed(overrides))


def composed(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the defaults with `overrides` as plain, unchecked data. Raise ConfigError where Hydra refuses one."""
    words = with_folders(overrides)
    with _explained():
        config = _declared(_parsed(words))
        return _resolved(_by_hydra(words) if config is None else config, overrides)


def applied(config: Configuration, overrides: Sequence[str]) -> Configuration:
    """Apply `overrides` to a recorded configuration: single keys, or whole groups (``data=indexed data.prefix=x``)."""
    result, defaults = OmegaConf.create(_literal(config.to_dict())), OmegaConf.create(composed())
    OmegaConf.set_struct(result, True)
    with _explained():
        parsed = _parsed(overrides)
        for override in parsed:
            key, line = str(override.key_or_group), str(override.input_line)
            if override.is_delete() or override.is_sweep_override():
                raise ConfigError(f"{line!r} sets no value", where="overrides", hint="write KEY=VALUE")
            if key in GROUPS:
                words = [str(o.input_line) for o in parsed if re.match(rf"\+*{key}[.=]", str(o.input_line))]
                words += [] if key == "batch" else ["batch=tiny"]  # any batch: only this group of the result is used
                OmegaConf.update(result, key, composed(words)[key], merge=False, force_add=True)
            else:
                is_known = OmegaConf.select(defaults, key, default=parsed) is not parsed
                try:
                    OmegaConf.update(result, key, override.value(), force_add=override.is_add() or is_known)
                except (AttributeError, KeyError) as e:
                    raise unknown_key(key) from e
        return resolve(result, overrides)


def resolve(config: DictConfig, overrides: Sequence[str] = ()) -> Configuration:
    """Return the checked configuration of what Hydra composed of `overrides`."""
    return from_dict(_resolved(config, overrides))


def with_folders(words: Sequence[str]) -> list[str]:
    """Replace each ``model=hf:DIR`` by a model registered with Hydra, read from the folder's config.json. Raise
    DataError where that cannot be read or is not covered."""
    result = []
    for word in words:
        match = re.match(r"(\+*model=)(['\"]?)(hf:.+)\2\Z", word)
        folder = folder_of(match[3]) if match else None
        if match and folder is not None:
            name = "hf_" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
            ConfigStore.instance().store(group="model", name=name, node=asdict(read_model(folder)))
            word = match[1] + name
        result.append(word)
    return result


def with_flags(flags: Mapping[str, Any], overrides: Sequence[str] | None) -> list[str]:
    """Return `flags` (name -> value, as config/flags.py declares them) and `overrides` as overrides. Raise ConfigError
    where both set a key to different values."""
    words = {name: FLAGS[name].override(value) for name, value in flags.items()}
    for override in overrides or ():
        key = override.lstrip("+").partition("=")[0]
        for name in [n for n in words if _sets(key, FLAGS[n].key)]:
            with _explained():
                (first,), (second,) = _parsed([words[name]]), _parsed([override])
            if first.key_or_group != second.key_or_group or first.value() != second.value():
                raise ConfigError(
                    f"{name} {flags[name]} and {override} differ", where="overrides", hint="give one of them"
                )
            del words[name]
    return [*words.values(), *(overrides or ())]


def is_fixed_by_plan(override: str) -> bool:
    """Tell whether an override sets what a plan has fixed: the model, the batch or the layout."""
    return _FIXED_BY_PLAN.match(override) is not None


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override of what a given plan has fixed."""
    for override in filter(is_fixed_by_plan, overrides):
        raise ConfigError(
            f"{override!r} is fixed by the plan",
            where="overrides",
            hint="make a plan with it: `holmes plan … -o plan.yaml`",
        )


def explained(error: Exception) -> ConfigError:
    """Return Hydra's error as one line that says what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, where = lines[0] if lines else str(error), "overrides"
    if unknown := re.search(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    if named := re.search(r"Could not find '(\w+)/([^']+)'", str(error)):
        listed = str(error).partition("Available options")[2].partition("Config search path")[0].splitlines()[1:]
        names = filter(None, map(str.strip, listed))
        return ConfigError(f"no {named[1]} {named[2]!r}", where=where, hint=nearest(named[2], names))
    bare = re.match(r"Error parsing override '([^'=]+)'", first)
    if bare and (word := meant_override(bare[1])):
        return ConfigError(f"{bare[1]!r} names no key", where=where, hint=f"did you mean {word!r}?")
    hint = "write KEY=VALUE; a value with other than plain characters needs quotes of its own: \"KEY='VALUE'\""
    if split := re.search(r"no viable alternative at input '([{\[])", str(error)):
        hint = f"quote the whole word, lest the shell take it apart: 'KEY={QUOTABLE[split[1]]}'"
    elif not ("grammar" in str(error) or "Lexer" in str(error) or "override" in type(error).__name__.lower()):
        return ConfigError(" ".join(lines[:12]) or type(error).__name__, where=where, hint="write KEY=VALUE")
    return ConfigError(f"cannot be read: {first}", where=where, hint=hint)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise errors of Hydra and OmegaConf as ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as e:
        raise explained(e) from e


def _parsed(words: Sequence[str]) -> list[Any]:
    return list(OverridesParser.create().parse_overrides(list(words)))


def _sets(key: str, other: str) -> bool:
    """Tell whether an override of `key` changes the value of `other`, which is no group."""
    return key == other or (key.startswith(f"{other}.") and other not in GROUPS)


def _declared(overrides: Sequence[Any]) -> DictConfig | None:
    """Return the declared options that `overrides` choose, with their values. None where Hydra has to compose: an
    option or a group that is not declared here (``+sweep=ablation``), a deletion, a sweep, or an error."""
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


def _by_hydra(words: Sequence[str]) -> DictConfig:
    """Return what Hydra composes of the files under conf/ and `words`."""
    GlobalHydra.instance().clear()
    base = VersionBase.instance()
    before = base.version_base  # of a Hydra application that this process may be
    try:
        with initialize_config_module("holmes_hpc.conf", version_base="1.3"):
            return compose("config", overrides=list(words))
    finally:
        base.version_base = before


def _resolved(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return plain data without Hydra's own part. Raise ConfigError for a value that is missing."""
    if any(OmegaConf.is_missing(config.batch, name) for name in keys(Batch)):
        raise _no_batch(str(config.model.name), overrides)
    kept = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
    try:
        data = OmegaConf.to_container(kept, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as e:
        raise ConfigError(str(e).splitlines()[0], where="configuration", hint="give it as KEY=VALUE") from e
    assert isinstance(data, dict)
    return {str(k): v for k, v in data.items()}


def _no_batch(model: str, overrides: Sequence[str]) -> ConfigError:
    """Return why no batch was composed: the one that is named does not exist, or none is known for the model."""
    named = [word.partition("=")[2] for word in overrides if word.startswith("batch=")]
    if named and named[-1] not in BATCHES:
        return ConfigError(f"no batch {named[-1]!r}", where="overrides", hint=nearest(named[-1], BATCHES))
    return ConfigError(
        f"no batch is known for model {model}",
        where="batch",
        hint="give batch=NAME, or batch.global_size, batch.micro_size and batch.sequence_length",
    )


def _literal(value: Any) -> Any:
    """Escape ``${`` in plain data that was resolved once, such that OmegaConf keeps it: a shell's ``${HOME}``."""
    if isinstance(value, dict):
        return {key: _literal(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
