"""Declaration of the keys of a dataclass, and checks of plain data (from files and configurations) against it.

A field is declared once, with its type, range, unit and help:

    steps: Annotated[int, key("optimizer steps to make", ge=1)] = 20

The declaration yields the check of a value (:func:`check`, :func:`make`), the text of allowed values
(:func:`allowed`), the files under generated_conf/, ``--help`` and docs/configuration.md (config/document.py). A range
applies to every number in a value: to each element of ``tuple[int, ...] | None``. msgspec checks types."""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from holmes_hpc.errors import Case, ConfigError, HolmesError, collected, is_typo, nearest, raise_all

T = TypeVar("T")
REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class KeySpec:
    """The help, unit and range of a field. `one_of`: the allowed texts; `infinite`: whether infinity is allowed;
    `auto`: whether ``auto`` means null."""

    help: str = ""
    unit: str = ""
    one_of: tuple[str, ...] = ()
    infinite: bool = False
    auto: bool = False
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def bounds(self) -> dict[str, Any]:
        """Return the bounds that are set, by name (gt, ge, lt, le)."""
        return {name: bound for name in ("gt", "ge", "lt", "le") if (bound := getattr(self, name)) is not None}


key = KeySpec  # in a declaration: Annotated[int, key("optimizer steps to make", ge=1)]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a dataclass. `type`: its annotation; `default`: REQUIRED if there is none."""

    name: str
    type: Any
    spec: KeySpec
    default: Any


def keys(cls: type[Any]) -> dict[str, Key]:
    """Return the keys of a dataclass by name, in the order of their declaration."""
    return _keys(cast("Hashable", cls))


@cache
def _keys(cls: Any) -> dict[str, Key]:
    hints = get_type_hints(cls, include_extras=True)
    declared = {}
    for field in dataclasses.fields(cls):
        if field.init:
            specs = [spec for spec in getattr(hints[field.name], "__metadata__", ()) if isinstance(spec, KeySpec)]
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            declared[field.name] = Key(field.name, hints[field.name], specs[0] if specs else KeySpec(), default)
    return declared


def check(instance: Any, where: str, error: type[HolmesError] = ConfigError, dotted: bool = False) -> None:
    """Raise `error` if a field of `instance` has a value outside its declared type or range.

    Call it in ``__post_init__``. It converts lists to tuples where tuples are declared. `dotted`: `where` is a
    configuration group, and errors name its keys in full (``train.steps``)."""
    for name, declared in keys(type(instance)).items():
        value = getattr(instance, name)
        if isinstance(value, list) and tuple in kinds(declared.type):
            object.__setattr__(instance, name, tuple(value))
    values = {name: getattr(instance, name) for name in keys(type(instance))}
    raise_all([*_wrong_values(type(instance), values, where, error, dotted)])


def _wrong_values(
    cls: type[Any], values: Mapping[str, Any], where: str, error: type[HolmesError], dotted: bool = False
) -> Iterator[HolmesError]:
    """Yield an error for each of `values` that has another type or range than `cls` declares."""
    for name, value in values.items():
        if not _fits(value, cls, name):
            message = f"{where}.{name}" if dotted else name
            hint = allowed(keys(cls)[name], value)
            yield error(f"{message} is {_short_repr(value)}", where="" if dotted else where, hint=hint)


class Checked:
    """A base class for dataclasses that check their values when they are created. First, :func:`check` checks each
    value. Then `_mistakes` checks their combinations. The class keywords `where`, `error` and `dotted` are arguments of
    :func:`check`. In `where`, ``{0.name}`` stands for the instance's name."""

    _check: tuple[str, type[HolmesError], bool]

    def __init_subclass__(cls, where: str = "", error: type[HolmesError] = ConfigError, dotted: bool = False) -> None:
        cls._check = where, error, dotted

    def __post_init__(self) -> None:
        template, error, dotted = self._check
        where = template.format(self)
        check(self, where, error, dotted)
        for case in self._mistakes():  # one at a time: a later case may rely on the absence of an earlier one
            error.refuse("" if dotted else where, case)

    def _mistakes(self) -> Iterable[Case]:
        """Return (whether the mistake is there, what it is, a hint) for values that do not fit together."""
        return ()


def _unknown(name: str, value: Any, declared: Mapping[str, Key], where: str, error: type[HolmesError]) -> HolmesError:
    """Return the error for the unknown key `name`.

    If the key is a rate in GB/s, such as rdma_GBps, the hint has the correct key and the rate converted to Gb/s. The
    correct key with the unconverted number would mean an eighth of the rate."""
    intended = declared.get(name.lower()) if name.endswith("GBps") else None
    if intended is not None and intended.spec.unit == "Gb/s" and isinstance(value, int | float):
        message = f"unknown key {name!r}: rates are in Gb/s, 8 for each GB/s"
        return error(message, where=where, hint=f"write {intended.name}: {8 * value:g}")
    return error(f"unknown key {name!r}", where=where, hint=nearest(name, declared))


def make(cls: type[T], values: Any, where: str, error: type[HolmesError] = ConfigError) -> T:
    """Build the dataclass `cls`, and dataclasses nested in it, from plain data.

    Raise `error` for unknown and missing keys, with all mistakes in its `others`. The dataclass checks its own values
    (:func:`check`). `where`: the place of `values`, for errors."""
    declared = keys(cls)
    if not isinstance(values, Mapping):
        message = f"is {_short_repr(values)}, not keys with values"
        raise error(message, where=where, hint=f"allowed keys: {', '.join(declared)}")
    errors = [_unknown(str(name), values[name], declared, where, error) for name in values if name not in declared]
    errors += [
        error(f"{name} is missing", where=where, hint=f"give {name}: {missing.spec.help or allowed(missing)}")
        for name, missing in declared.items()
        if missing.default is REQUIRED and name not in values and not any(is_typo(str(v), name) for v in values)
    ]
    arguments = {}
    for name in [name for name in values if name in declared]:
        with collected(errors):
            arguments[name] = _nested(values[name], declared[name], f"{where}.{name}", error)
    if errors:
        raise_all([*errors, *_wrong_values(cls, arguments, where, error)])
    try:
        return cls(**arguments)
    except HolmesError as e:  # the dataclass does not know its full path
        raise e.moved(lambda place: where if place and where.startswith(place) else place) from None


def _nested(value: Any, declared: Key, where: str, error: type[HolmesError]) -> Any:
    """Convert plain data to the dataclass that its key declares, also in a list or map; return other data unchanged."""
    for member in _members(declared.type):
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping):
            return make(member, value, where, error)  # type: ignore[arg-type]
        inner = next((t for a in get_args(member) for t in _members(a) if dataclasses.is_dataclass(t)), None)
        if inner is None:
            continue
        if isinstance(value, list):
            instances, errors = list[Any](), list[HolmesError]()
            for i, entry in enumerate(value):
                with collected(errors):
                    instances.append(make(inner, entry, f"{where}[{i}]", error))  # type: ignore[arg-type]
            raise_all(errors)
            return tuple(instances)
        if isinstance(value, Mapping):
            return {
                k: v if v is None or dataclasses.is_dataclass(v) else make(inner, v, f"{where}.{k}", error)  # type: ignore[arg-type]
                for k, v in value.items()
            }
    return value


def allowed(declared: Key, value: Any = None) -> str:
    """Return the allowed values of a key as a hint, with the most similar one to the rejected text `value`."""
    if choices := declared.spec.one_of:
        matches = difflib.get_close_matches(value, choices, 1, 0.75) if isinstance(value, str) else []
        text = f"use {', '.join(choices)}" + "".join(f" (did you mean {str(match)!r}?)" for match in matches)
    else:
        text = "use " + " or ".join(dict.fromkeys(_type_text(m, declared.spec) for m in _members(declared.type)))
    text += f" ({declared.spec.unit})" if declared.spec.unit else ""
    null = ", null or auto" if declared.spec.auto else ", or null"
    text += null if type(None) in _all_members(declared.type) else ""
    is_exponent = isinstance(value, str) and re.fullmatch(r"[+-]?\d+\.?\d*e[+-]?\d+", value, re.IGNORECASE)
    if is_exponent and not {int, float}.isdisjoint(kinds(declared.type)):
        text += f"; YAML reads {value} as text: write {Decimal(value):f}"
    return text


def _type_text(member: Any, spec: KeySpec) -> str:
    """Return one of a key's types as text, with the key's range: `a list of whole numbers from 1`."""
    low = f" above {spec.gt:g}" if spec.gt is not None else f" from {spec.ge:g}" if spec.ge is not None else ""
    high = f" below {spec.lt:.10g}" if spec.lt is not None else f" up to {spec.le:.10g}" if spec.le is not None else ""
    kind, limits = _kind(member), low + ("," if low and high else "") + high
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + limits
    arguments = [t for argument in get_args(member) if argument is not Ellipsis for t in _members(argument)]
    element_types = arguments if kind is tuple else arguments[1:]  # the first argument of a map is its keys' type
    plurals = {int: f"whole numbers{limits}", float: f"numbers{limits}", str: "texts"}
    elements = " or ".join(plurals.get(t, "values") for t in element_types)
    texts = {bool: "true or false", str: "text", tuple: f"a list of {elements}"}
    return texts.get(kind, f"keys with {elements or 'values'}")


def _fits(value: Any, cls: Any, name: str) -> bool:
    """Return whether `value` has the type and range that `cls` declares for its key `name`."""
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
    """Return (classes that the value of a key may have, whether all are dataclasses, whether it may be null)."""
    all_members = _all_members(keys(cls)[name].type)
    members = [m for m in all_members if m is not type(None)]
    classes = tuple(m for m in members if isinstance(m, type))
    return classes, all(map(dataclasses.is_dataclass, members)), type(None) in all_members


@cache
def _bounded(cls: Any, name: str) -> Any:
    """Return the type of a key for msgspec. Each number in it has the key's range; dataclasses are not checked."""
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


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(annotation: Any) -> Any:
    """Return an annotation without Annotated."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _all_members(annotation: Any) -> list[Any]:
    """Return the members of a union, or the single type, including the type of None."""
    bare = _plain(annotation)
    members = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    return [_plain(member) for member in members]


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union (or the single type) without null."""
    return [m for m in _all_members(annotation) if m is not type(None)]


def _kind(member: Any) -> Any:
    """Return the kind of a type: int, float, bool, str, tuple (of any list), dict (of any map) or a dataclass."""
    origin = get_origin(member) or member
    if origin in (tuple, list):
        return tuple
    return dict if isinstance(origin, type) and issubclass(origin, Mapping) else origin


def kinds(annotation: Any) -> list[Any]:
    """Return the kinds (:func:`_kind`) of a key's values, without null."""
    return [_kind(m) for m in _members(annotation)]
