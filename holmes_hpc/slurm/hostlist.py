"""Slurm's host lists: `expand("n[1-3,5],m7")` and back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from holmes_hpc.errors import SiteError

MOST_HOSTS = 100_000  # a typing error such as n[1-99999999] must not fill the memory
_RANGE = re.compile(r"(\d+)-(\d+)\Z")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)\Z", re.DOTALL)
_PLAIN = re.compile(r"[^\[\],\s]+\Z")


def expand(text: str) -> list[str]:
    """The hosts of a Slurm host list, in its order. Several brackets in one name multiply, the last varies fastest;
    a bracket may hold names or further brackets. The width of a range's first number is kept (``[08-10]``)."""
    hosts = [host for part in _split(text, text) for host in _expand_one(part, text)]
    return hosts if hosts != [""] else []


def compress(hosts: Iterable[str]) -> str:
    """A host list for `hosts`, without duplicates; numbers ascending, names in the order of their first appearance.
    Only numbers at the end of a name make ranges: Slurm takes no others everywhere."""
    groups: dict[tuple[str, str] | str, list[str]] = {}
    for host in hosts:
        if not _PLAIN.match(host):
            raise _bad(host, "a host name is empty or holds brackets, commas or spaces")
        match = _NUMBERED.match(host)
        ends = match is not None and not match[3]
        groups.setdefault((match[1], "") if match and ends else host, []).append(match[2] if match and ends else host)
    parts = []
    for key, numbers in groups.items():
        if isinstance(key, str):
            parts.append(key)
            continue
        ranges = _ranges(numbers)
        single = len(ranges) == 1 and "-" not in ranges[0]
        parts.append(f"{key[0]}{ranges[0] if single else '[' + ','.join(ranges) + ']'}{key[1]}")
    return ",".join(parts)


def _ranges(numbers: list[str]) -> list[str]:
    runs: list[list[str]] = []
    for digits in sorted(set(numbers), key=lambda d: (int(d), len(d))):
        if runs and digits == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1].append(digits)
        else:
            runs.append([digits])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _bad(text: str, what: str) -> SiteError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return SiteError(what, where=f"host list {shown!r}", hint="write it as Slurm does: n[1-3,5],m7")


def _split(text: str, whole: str) -> list[str]:
    """Cut at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth < 0:
            raise _bad(whole, "']' without '['")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise _bad(whole, "'[' without ']'")
    parts.append(text[start:])
    if len(parts) > 1 and not all(parts):
        raise _bad(whole, "an empty name between commas")
    return parts


def _expand_one(part: str, whole: str) -> list[str]:
    pieces: list[list[str]] = []
    rest = part
    while rest:
        opening = rest.find("[")
        if opening != 0:
            pieces.append([rest if opening < 0 else rest[:opening]])
            rest = "" if opening < 0 else rest[opening:]
            continue
        closing = _closing(rest)
        inner = [name for item in _split(rest[1:closing], whole) for name in _expand_item(item, whole)]
        pieces.append(inner)
        rest = rest[closing + 1 :]
    count = 1
    for choices in pieces:
        count *= len(choices)
    if count > MOST_HOSTS:
        raise _bad(whole, f"{count} hosts, more than {MOST_HOSTS}")
    return ["".join(choice) for choice in product(*pieces)]


def _closing(text: str) -> int:
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth == 0:
            return i
    raise _bad(text, "'[' without ']'")


def _expand_item(item: str, whole: str) -> list[str]:
    if not item:
        raise _bad(whole, "an empty bracket or item")
    match = _RANGE.match(item)
    if match is None:
        return _expand_one(item, whole)
    low, high = int(match[1]), int(match[2])
    if high < low or high - low >= MOST_HOSTS:
        raise _bad(whole, f"the range {item} runs backwards or is too long")
    return [str(n).zfill(len(match[1])) for n in range(low, high + 1)]
