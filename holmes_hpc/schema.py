"""How a dataclass says what each of its keys may be, and how plain data (of a file, of a configuration) is checked.

A field is declared once, with its type, range, unit and help:

    steps: Annotated[int, key("optimizer steps to make", ge=1)] = 20

From that come the check of a value (:func:`check`, :func:`make`), the words for what is allowed (:func:`allowed`), the
files under conf/, ``--help`` and docs/configuration.md (config/document.py). A range holds for every number in a value:
of ``tuple[int, ...] | None`` for each of its elements. Types are checked by msgspec.
"""

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
class Declared:
    """What a field says of itself. Bounds as msgspec has them; `one_of`: the words that it may be; `infinite`: infinity
    is a value too."""

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


def key(help: str, **more: Any) -> Declared:
    """A field's line of help; `more`: unit, one_of, infinite, and its range (gt, ge, lt, le)."""
    return Declared(help, **more)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a group. `type`: as declared; `default` is REQUIRED where it must be given."""

    name: str
    type: Any
    says: Declared
    default: Any


def keys(cls: type[Any]) -> dict[str, Key]:
    """The keys of a dataclass, in order."""
    if cls not in _KEYS:
        _KEYS[cls] = _declared(cls)
    return _KEYS[cls]


_KEYS: dict[type[Any], dict[str, Key]] = {}


def _declared(cls: type[Any]) -> dict[str, Key]:
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for f in dataclasses.fields(cls):
        if f.init:
            says = [m for m in getattr(hints[f.name], "__metadata__", ()) if isinstance(m, Declared)]
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            found[f.name] = Key(f.name, hints[f.name], says[0] if says else Declared(), default)
    return found


def check(made: Any, where: str, error: type[HolmesError] = ConfigError, dotted: bool = False) -> None:
    """Raise `error` for the first field of a dataclass whose value is not of its declared type and range; a list
    becomes a tuple where one is declared. For ``__post_init__``. `dotted`: `where` is a group of the configuration, and
    its keys are named as they are given (``train.steps``)."""
    for name, declared in keys(type(made)).items():
        value = getattr(made, name)
        if isinstance(value, list) and tuple in kinds(declared.type):
            value = tuple(value)
            object.__setattr__(made, name, value)
        if not _fits(value, type(made), name):
            what = f"{where}.{name}" if dotted else name
            raise error(f"{what} is {_shown(value)}", where="" if dotted else where, hint=allowed(declared, value))


class Checked:
    """A dataclass whose fields are checked (:func:`check`) when it is made, and nothing else."""

    _check: tuple[str, type[HolmesError]]

    def __init_subclass__(cls, where: str = "", error: type[HolmesError] = ConfigError) -> None:
        cls._check = where, error

    def __post_init__(self) -> None:
        check(self, *self._check)


def refuse(where: str, *cases: tuple[Any, str, str], error: type[HolmesError] = ConfigError) -> None:
    """Raise `error` for the first of `cases` (whether it is wrong, what is wrong, what to do) that is wrong."""
    for is_wrong, what, hint in cases:
        if is_wrong:
            raise error(what, where=where, hint=hint)


def _unknown(name: str, value: Any, declared: Mapping[str, Key], where: str, error: type[HolmesError]) -> HolmesError:
    """An unknown key. One that says GB/s, such as rdma_GBps, is told with its number: with the key put right alone the
    rate would be an eighth."""
    meant = declared.get(name.lower()) if name.endswith("GBps") else None
    if meant is not None and meant.says.unit == "Gb/s" and isinstance(value, int | float):
        return error(
            f"unknown key {name!r}: rates are in Gb/s, 8 for each GB/s",
            where=where,
            hint=f"write {meant.name}: {8 * value:g}",
        )
    return error(f"unknown key {name!r}", where=where, hint=nearest(name, declared))


def make(cls: type[T], values: Any, where: str, error: type[HolmesError] = ConfigError) -> T:
    """Dataclass `cls` from plain data, nested ones too; unknown and missing keys are named. Its values the dataclass
    checks itself (:func:`check`)."""
    declared = keys(cls)
    if not isinstance(values, Mapping):
        raise error(f"is {_shown(values)}, not keys with values", where=where, hint=f"known are: {', '.join(declared)}")
    for name in values:
        if name not in declared:
            raise _unknown(str(name), values[name], declared, where, error)
    for k in declared.values():
        if k.default is REQUIRED and k.name not in values:
            raise error(f"{k.name} is missing", where=where, hint=f"give {k.name}: {k.says.help or allowed(k)}")
    given = {name: _nested(value, declared[name], f"{where}.{name}", error) for name, value in values.items()}
    try:
        return cls(**given)
    except HolmesError as e:  # a dataclass knows what it is, not always where it lies
        known = e.where and where.startswith(e.where)  # of the same thing, more is known here
        raise type(e)(e.what, where=where if known else e.where, hint=e.hint) from None


def _nested(value: Any, declared: Key, where: str, error: type[HolmesError]) -> Any:
    """Plain data as the dataclass that its key declares, alone or in a list; anything else as it is."""
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
    """What a key may be, in words; for a word that is none of those known, the nearest."""
    if known := declared.says.one_of:
        close = difflib.get_close_matches(value, known, 1, 0.75) if isinstance(value, str) else []
        said = f"use {', '.join(known)}" + "".join(f" (did you mean {str(word)!r}?)" for word in close)
    else:
        said = "use " + " or ".join(dict.fromkeys(_phrase(m, declared.says) for m in _members(declared.type)))
    said += f" ({declared.says.unit})" if declared.says.unit else ""
    return said + (", or null" if type(None) in _all_members(declared.type) else "")


def _phrase(member: Any, says: Declared) -> str:
    """One of a key's types in words, with its range."""
    kind = _kind(member)
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(says)
    inner = [t for a in get_args(member) if a is not Ellipsis for t in _members(a)]
    of = {int: "whole numbers" + _range(says), float: "numbers" + _range(says), str: "texts"}
    many = " or ".join(of.get(t, "values") for t in (inner if kind is tuple else inner[1:]))
    return {bool: "true or false", str: "text", tuple: f"a list of {many}"}.get(kind, f"keys with {many or 'values'}")


def _range(says: Declared) -> str:
    low = f" above {says.gt:g}" if says.gt is not None else f" from {says.ge:g}" if says.ge is not None else ""
    high = f" below {says.lt:.10g}" if says.lt is not None else f" up to {says.le:.10g}" if says.le is not None else ""
    return low + ("," if low and high else "") + high


def _fits(value: Any, cls: Any, name: str) -> bool:
    declared = keys(cls)[name]
    if isinstance(value, float) and not math.isfinite(value) and not declared.says.infinite:
        return False
    if declared.says.one_of and value is not None and value not in declared.says.one_of:
        return False
    classes, only_dataclasses, nullable = _classes(cls, name)
    if dataclasses.is_dataclass(value) or isinstance(value, Enum):
        return isinstance(value, classes)
    if only_dataclasses:
        return value is None and nullable
    if isinstance(value, float):
        value = float(value)  # of numpy's too, which msgspec does not know
    try:
        msgspec.convert(value, _bounded(cls, name), strict=True)
    except (msgspec.ValidationError, UnicodeError):  # half of a surrogate pair is no text
        return False
    return True


@cache
def _classes(cls: Any, name: str) -> tuple[tuple[type, ...], bool, bool]:
    """(the classes that a key's value may have, whether all are dataclasses, whether it may be null)."""
    every = _all_members(keys(cls)[name].type)
    members = [m for m in every if m is not type(None)]
    return (
        tuple(m for m in members if isinstance(m, type)),
        all(dataclasses.is_dataclass(m) for m in members),
        type(None) in every,
    )


@cache
def _bounded(cls: Any, name: str) -> Any:
    """A key's type for msgspec: its range with every number in it, dataclasses taken as they are."""
    declared = keys(cls)[name]
    bounds = declared.says.bounds()

    def put(annotation: Any) -> Any:
        bare = _plain(annotation)
        if bare in (int, float):
            return Annotated[bare, msgspec.Meta(**bounds)] if bounds else bare
        if isinstance(bare, type) and dataclasses.is_dataclass(bare):
            return Any
        origin, inner = get_origin(bare), get_args(bare)
        if origin in (Union, types.UnionType):
            return Union[tuple(put(a) for a in inner)]  # noqa: UP007 (of a tuple)
        if origin in (tuple, list):
            return tuple[put(inner[0]), ...]  # type: ignore[misc]
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return dict[inner[0], put(inner[1])]  # type: ignore[misc, valid-type]
        return bare

    return put(declared.type)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(annotation: Any) -> Any:
    """An annotation without Annotated."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _all_members(annotation: Any) -> list[Any]:
    bare = _plain(annotation)
    parts = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    return [_plain(p) for p in parts]


def _members(annotation: Any) -> list[Any]:
    """The members of a union (or the one type) but for null."""
    return [m for m in _all_members(annotation) if m is not type(None)]


def _kind(member: Any) -> Any:
    """int, float, bool, str, tuple, dict or a dataclass."""
    origin = get_origin(member) or member
    if origin in (tuple, list):
        return tuple
    return dict if isinstance(origin, type) and issubclass(origin, Mapping) else origin


def kinds(annotation: Any) -> list[Any]:
    """Return the kinds of a key's values but for null: int, float, bool, str, tuple, dict or a dataclass."""
    return [_kind(m) for m in _members(annotation)]
