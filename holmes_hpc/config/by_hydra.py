"""Configurations composed by Hydra: from overrides, or a recorded one with more of them; errors in one line."""

from __future__ import annotations

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
from holmes_hpc.config.hugging_face import folder_of, read_model
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import BATCHES
from holmes_hpc.config.options import meant
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.schema import keys

VALUES = {"{": "{a: 1, b: 2}", "[": "[1, 2]"}  # what a shell takes apart where it is not quoted
ELSEWHERE = {  # what Megatron-LM, DeepSpeed and transformers call our keys
    "learning_rate": "train.lr",
    "batch_size": "batch.global_size",
    "global_batch_size": "batch.global_size",
    "train_batch_size": "batch.global_size",
    "micro_batch_size": "batch.micro_size",
    "per_device_train_batch_size": "batch.micro_size",
    "seq_length": "batch.sequence_length",
    "seq_len": "batch.sequence_length",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "data_path": "data.prefix",
    "path": "data.prefix",
    "tensor_model_parallel_size": "plan.tp",
    "pipeline_model_parallel_size": "plan.pp",
    "save_interval": "train.checkpoint_interval",
}


def composed(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The files under conf/ with `overrides`, as plain data that is not checked. ConfigError for what Hydra refuses."""
    GlobalHydra.instance().clear()
    base = VersionBase.instance()
    before = base.version_base  # of a Hydra application that this process may be: ours is not to change it
    try:
        with initialize_config_module("holmes_hpc.conf", version_base="1.3"):
            return _resolved(compose("config", overrides=with_folders(overrides)), overrides)
    except (HydraException, OmegaConfBaseException) as e:
        raise explained(e) from e
    finally:
        base.version_base = before


def with_folders(words: Sequence[str]) -> list[str]:
    """Overrides or arguments in which each ``model=hf:DIR`` names a model that Hydra knows from now on: the folder's,
    by its config.json. DataError where that cannot be read or is not covered."""
    made = []
    for word in words:
        given = re.match(r"(\+*model=)(['\"]?)(hf:.+)\2\Z", word)
        folder = folder_of(given[3]) if given else None
        if given and folder is not None:
            option = "hf_" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
            ConfigStore.instance().store(group="model", name=option, node=asdict(read_model(folder)))
            word = given[1] + option
        made.append(word)
    return made


def resolve(config: DictConfig, overrides: Sequence[str] = ()) -> Configuration:
    """What Hydra composed of `overrides`, checked."""
    return from_dict(_resolved(config, overrides))


def _resolved(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Without Hydra's own part; a value that is still missing is an error."""
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
    """Why no batch was composed: the one that is named does not exist, or none is known for the model."""
    named = [word.partition("=")[2] for word in overrides if word.startswith("batch=")]
    if named and named[-1] not in BATCHES:
        return ConfigError(f"no batch {named[-1]!r}", where="overrides", hint=nearest(named[-1], BATCHES))
    return ConfigError(
        f"no batch is known for model {model}",
        where="batch",
        hint="give batch=NAME, or batch.global_size, batch.micro_size and batch.sequence_length",
    )


def applied(config: Configuration, overrides: Sequence[str]) -> Configuration:
    """A recorded configuration with more `overrides`: single keys, or whole groups (``data=indexed data.prefix=x``)."""
    made, defaults = OmegaConf.create(_literal(config.to_dict())), OmegaConf.create(composed())
    OmegaConf.set_struct(made, True)
    key = ""
    try:
        found = OverridesParser.create().parse_overrides(list(overrides))
        for one in found:
            key = str(one.key_or_group)
            if one.is_delete() or one.is_sweep_override():
                raise ConfigError(f"{one.input_line!r} sets no value", where="overrides", hint="write KEY=VALUE")
            if key in GROUPS:
                words = [str(o.input_line) for o in found if re.match(rf"\+*{key}[.=]", str(o.input_line))]
                words += [] if key == "batch" else ["batch=tiny"]  # any will do: only the group's own part is taken
                OmegaConf.update(made, key, composed(words)[key], merge=False, force_add=True)
            else:
                known = OmegaConf.select(defaults, key, default=found) is not found
                OmegaConf.update(made, key, one.value(), force_add=one.is_add() or known)
    except (HydraException, OmegaConfBaseException) as e:
        raise explained(HydraException(f"Could not override '{key}'") if "not in struct" in str(e) else e) from e
    return resolve(made, overrides)


def _literal(value: Any) -> Any:
    """Plain data whose text OmegaConf takes as it is: what was resolved once may hold a shell's ``${HOME}``."""
    if isinstance(value, dict):
        return {key: _literal(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _meant_key(word: str, known: Sequence[str]) -> str:
    """The key that other programs call so, or the one that ends so in another group; else the nearest."""
    last = word.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    key = ELSEWHERE.get(last) or (same[0] if len(same) == 1 else None)
    return f"did you mean {key!r}?" if key else nearest(word, known)


def explained(error: Exception) -> ConfigError:
    """Hydra's error as one line; for an unknown key, the nearest known one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown:
        known = sorted(_keys(composed()))
        return ConfigError(f"unknown key {unknown[1]!r}", where="overrides", hint=_meant_key(unknown[1], known))
    option = re.search(r"Could not find '(\w+)/([^']+)'", str(error))
    if option:
        known = [line.strip() for line in _options(str(error))]
        return ConfigError(
            f"no {option[1]} {option[2]!r}", where="overrides", hint=nearest(option[2], filter(None, known))
        )
    bare = re.match(r"Error parsing override '([^'=]+)'", lines[0] if lines else "")
    if bare and (word := meant(bare[1])):
        return ConfigError(f"{bare[1]!r} names no key", where="overrides", hint=f"did you mean {word!r}?")
    open_word = re.search(r"no viable alternative at input '([{\[])", str(error))
    if open_word:  # the shell took it apart
        return ConfigError(
            f"cannot be read: {lines[0] if lines else error}",
            where="overrides",
            hint=f"quote the whole word, lest the shell take it apart: 'KEY={VALUES[open_word[1]]}'",
        )
    if "grammar" in str(error) or "Lexer" in str(error) or "override" in type(error).__name__.lower():
        return ConfigError(
            f"cannot be read: {lines[0] if lines else error}",
            where="overrides",
            hint="write KEY=VALUE; a value with other than plain characters needs quotes of its own: \"KEY='VALUE'\"",
        )
    return ConfigError(" ".join(lines[:12]) or type(error).__name__, where="overrides", hint="write KEY=VALUE")


def _options(message: str) -> list[str]:
    """The lines of Hydra's list of a group's options."""
    return message.partition("Available options")[2].partition("Config search path")[0].splitlines()[1:]


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
