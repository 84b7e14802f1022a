"""Declaration of the keys of a dataclass, and checks of plain data (from files and configurations) against it.

A field is declared once, with its type, range, unit and help:

    steps: Annotated[int, key("optimizer steps to make", ge=1)] = 20

The declaration yields the check of a value (:func:`check`, :func:`make`), the text of allowed values
(:func:`allowed`), the files under conf/, ``--help`` and docs/configuration.md (config/document.py). A range applies
to every number in a value: to each element of ``tuple[int, ...] | None``. msgspec checks types."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from holmes_hpc.errors import ConfigError, HolmesError, nearest

T = TypeVar("T")
REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class KeySpec:
    """The help, unit and bounds of a field. `one_of`: the allowed texts; `infinite`: infinity is allowed."""

    help: str = ""
    unit: str = ""
    one_of: tuple[str, ...] = ()
    infinite: bool = False
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def bounds(self) -> dict[str, Any]:
        return {n: v for n in ("gt", "ge", "lt", "le") if (v := getattr(self, n)) is not None}


def key(help: str, **details: Any) -> KeySpec:
    """Return the declaration of a field; `details`: unit, one_of, infinite, and its range (gt, ge, lt, le)."""
    return KeySpec(help, **details)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a group. `type`: the annotation; `default`: REQUIRED if there is none."""

    name: str
    type: Any
    spec: KeySpec
    default: Any


def keys(cls: type[Any]) -> dict[str, Key]:
    """Return the keys of a dataclass, in order."""
    if cls not in _KEYS:
        _KEYS[cls] = _read_keys(cls)
    return _KEYS[cls]


_KEYS: dict[type[Any], dict[str, Key]] = {}


def _read_keys(cls: type[Any]) -> dict[str, Key]:
    hints = get_type_hints(cls, include_extras=True)
    declared = {}
    for field in dataclasses.fields(cls):
        if field.init:
            specs = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, KeySpec)]
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            declared[field.name] = Key(field.name, hints[field.name], specs[0] if specs else KeySpec(), default)
    return declared


def check(instance: Any, where: str, error: type[HolmesError] = ConfigError, dotted: bool = False) -> None:
    """Raise `error` for the first field whose value has another type or range than declared.

    Lists become tuples where tuples are declared. For ``__post_init__``. `dotted`: `where` is a configuration group,
    and errors name its keys in full (``train.steps``)."""
    for name, declared in keys(type(instance)).items():
        value = getattr(instance, name)
        if isinstance(value, list) and tuple in kinds(declared.type):
            value = tuple(value)
            object.__setattr__(instance, name, value)
        if not _fits(value, type(instance), name):
            key_name = f"{where}.{name}" if dotted else name
            raise error(f"{key_name} is {_shown(value)}", where="" if dotted else where, hint=allowed(declared, value))


class Checked:
    """A base class of dataclasses that only check their fields (:func:`check`) when created."""

    _check: tuple[str, type[HolmesError]]

    def __init_subclass__(cls, where: str = "", error: type[HolmesError] = ConfigError) -> None:
        cls._check = where, error

    def __post_init__(self) -> None:
        check(self, *self._check)


def refuse(where: str, *cases: tuple[Any, str, str], error: type[HolmesError] = ConfigError) -> None:
    """Raise `error` for the first of `cases` (is wrong, message, hint) that is wrong."""
    error.refuse(*((is_wrong, message, where, hint) for is_wrong, message, hint in cases))


def _unknown(name: str, value: Any, declared: Mapping[str, Key], where: str, error: type[HolmesError]) -> HolmesError:
    """Return the error for an unknown key.

    For a rate in GB/s, such as rdma_GBps, the hint has the converted number: renaming the key alone would give an
    eighth."""
    intended = declared.get(name.lower()) if name.endswith("GBps") else None
    if intended is not None and intended.spec.unit == "Gb/s" and isinstance(value, int | float):
        return error(
            f"unknown key {name!r}: rates are in Gb/s, 8 for each GB/s",
            where=where,
            hint=f"write {intended.name}: {8 * value:g}",
        )
    return error(f"unknown key {name!r}", where=where, hint=nearest(name, declared))


def make(cls: type[T], values: Any, where: str, error: type[HolmesError] = ConfigError) -> T:
    """Build the dataclass `cls` from plain data, nested ones too.

    Errors name unknown and missing keys. The dataclass checks its values itself (:func:`check`)."""
    declared = keys(cls)
    if not isinstance(values, Mapping):
        raise error(
            f"is {_shown(values)}, not keys with values", where=where, hint=f"allowed keys: {', '.join(declared)}"
        )
    for name in values:
        if name not in declared:
            raise _unknown(str(name), values[name], declared, where, error)
    for declared_key in declared.values():
        if declared_key.default is REQUIRED and declared_key.name not in values:
            raise error(
                f"{declared_key.name} is missing",
                where=where,
                hint=f"give {declared_key.name}: {declared_key.spec.help or allowed(declared_key)}",
            )
    arguments = {name: _nested(value, declared[name], f"{where}.{name}", error) for name, value in values.items()}
    try:
        return cls(**arguments)
    except HolmesError as e:  # the error may not name the full path
        is_outer = e.where and where.startswith(e.where)  # this path is more precise
        raise type(e)(e.what, where=where if is_outer else e.where, hint=e.hint) from None


def _nested(value: Any, declared: Key, where: str, error: type[HolmesError]) -> Any:
    """Convert plain data to the dataclass that its key declares, alone or in a list; return the rest unchanged."""
    for member in _members(declared.type):
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping):
            return make(member, value, where, error)  # type: ignore[arg-type]
        inner = next((t for a in get_args(member) for t in _members(a) if dataclasses.is_dataclass(t)), None)
        if inner is None:
            continue
        if isinstance(value, list):
            return tuple(make(inner, v, f"{where}[{i}]", error) for i, v in enumerate(value))  # type: ignore[arg-type]
        if isinstance(value, Mapping):
            return {
                k: v if v is None or dataclasses.is_dataclass(v) else make(inner, v, f"{where}.{k}", error)  # type: ignore[arg-type]
                for k, v in value.items()
            }
    return value


def allowed(declared: Key, value: Any = None) -> str:
    """Return the allowed values of a key as text; for an unknown text also the nearest one."""
    if choices := declared.spec.one_of:
        matches = difflib.get_close_matches(value, choices, 1, 0.75) if isinstance(value, str) else []
        text = f"use {', '.join(choices)}" + "".join(f" (did you mean {str(match)!r}?)" for match in matches)
    else:
        text = "use " + " or ".join(dict.fromkeys(_phrase(m, declared.spec) for m in _members(declared.type)))
    text += f" ({declared.spec.unit})" if declared.spec.unit else ""
    return text + (", or null" if type(None) in _all_members(declared.type) else "")


def _phrase(member: Any, spec: KeySpec) -> str:
    """Return one of a key's types as text, with its range."""
    kind = _kind(member)
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(spec)
    inner = [t for a in get_args(member) if a is not Ellipsis for t in _members(a)]
    plurals = {int: "whole numbers" + _range(spec), float: "numbers" + _range(spec), str: "texts"}
    elements = " or ".join(plurals.get(t, "values") for t in (inner if kind is tuple else inner[1:]))
    return {bool: "true or false", str: "text", tuple: f"a list of {elements}"}.get(
        kind, f"keys with {elements or 'values'}"
    )


def _range(spec: KeySpec) -> str:
    low = f" above {spec.gt:g}" if spec.gt is not None else f" from {spec.ge:g}" if spec.ge is not None else ""
    high = f" below {spec.lt:.10g}" if spec.lt is not None else f" up to {spec.le:.10g}" if spec.le is not None else ""
    return low + ("," if low and high else "") + high


def _fits(value: Any, cls: Any, name: str) -> bool:
    declared = keys(cls)[name]
    if isinstance(value, float) and not math.isfinite(value) and not declared.spec.infinite:
        return False
    if declared.spec.one_of and value is not None and value not in declared.spec.one_of:
        return False
    classes, only_dataclasses, nullable = _classes(cls, name)
    if dataclasses.is_dataclass(value) or isinstance(value, Enum):
        return isinstance(value, classes)
    if only_dataclasses:
        return value is None and nullable
    if isinstance(value, float):
        value = float(value)  # numpy's floats too, which msgspec rejects
    try:
        msgspec.convert(value, _bounded(cls, name), strict=True)
    except (msgspec.ValidationError, UnicodeError):  # a lone surrogate is not text
        return False
    return True


@cache
def _classes(cls: Any, name: str) -> tuple[tuple[type, ...], bool, bool]:
    """Return (classes that a key's value may have, whether all are dataclasses, whether it may be null)."""
    all_members = _all_members(keys(cls)[name].type)
    members = [m for m in all_members if m is not type(None)]
    return (
        tuple(m for m in members if isinstance(m, type)),
        all(dataclasses.is_dataclass(m) for m in members),
        type(None) in all_members,
    )


@cache
def _bounded(cls: Any, name: str) -> Any:
    """Return a key's type for msgspec: ranges at every number, dataclasses unchecked."""
    declared = keys(cls)[name]
    bounds = declared.spec.bounds()

    def convert(annotation: Any) -> Any:
        bare = _plain(annotation)
        if bare in (int, float):
            return Annotated[bare, msgspec.Meta(**bounds)] if bounds else bare
        if isinstance(bare, type) and dataclasses.is_dataclass(bare):
            return Any
        origin, inner = get_origin(bare), get_args(bare)
        if origin in (Union, types.UnionType):
            return Union[tuple(convert(a) for a in inner)]  # noqa: UP007 (of a tuple)
        if origin in (tuple, list):
            return tuple[convert(inner[0]), ...]  # type: ignore[misc]
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return dict[inner[0], convert(inner[1])]  # type: ignore[misc, valid-type]
        return bare

    return convert(declared.type)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(annotation: Any) -> Any:
    """Return an annotation without Annotated."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _all_members(annotation: Any) -> list[Any]:
    bare = _plain(annotation)
    parts = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    return [_plain(p) for p in parts]


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union (or the single type) without null."""
    return [m for m in _all_members(annotation) if m is not type(None)]


def _kind(member: Any) -> Any:
    """Return int, float, bool, str, tuple, dict or a dataclass."""
    origin = get_origin(member) or member
    if origin in (tuple, list):
        return tuple
    return dict if isinstance(origin, type) and issubclass(origin, Mapping) else origin


def kinds(annotation: Any) -> list[Any]:
    """Return the kinds of a key's values without null: int, float, bool, str, tuple, dict or a dataclass."""
    return [_kind(m) for m in _members(annotation)]
