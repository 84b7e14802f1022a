"""Slurm's host lists: `expand("n[1-3,5],m7")` and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import product
from string import digits

from holmes_hpc.errors import SiteError

MOST_HOSTS = 100_000  # a typing error such as n[1-99999999] must not fill the memory
_RANGE = re.compile(r"(\d+)-(\d+)\Z")
_PLAIN = re.compile(r"[^\[\],\s]+\Z")
_TOKEN = re.compile(r"[\[\],]|[^\[\],]+")


def expand(text: str) -> list[str]:
    """The hosts of a Slurm host list, in its order. Several brackets in one name multiply, the last varies fastest;
    a bracket may hold names or further brackets. The width of a range's first number is kept (``[08-10]``)."""
    return _names(iter([*_TOKEN.findall(text), ""]), "", text) if text else []


def numbers(text: str) -> list[int]:
    """The numbers in a list of tasks or of an array's elements (``0-2,5``), without what is none."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [
        n
        for low, _, high in ranges
        if low.isdecimal()
        for n in range(int(low), int(high if high.isdecimal() else low) + 1)
    ]


def compress(hosts: Iterable[str]) -> str:
    """A host list for `hosts`, without duplicates; numbers ascending, names in the order of their first appearance.
    Only numbers at the end of a name make ranges: Slurm takes no others everywhere."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for host in hosts:
        if not _PLAIN.match(host):
            raise _bad(host, "a host name is empty or holds brackets, commas or spaces")
        stem = host.rstrip(digits)
        groups.setdefault((stem, stem == host), []).append(host[len(stem) :])
    ranges = [(stem, ",".join(_ranges(numbers))) for (stem, _), numbers in groups.items()]
    return ",".join(f"{stem}[{numbers}]" if {",", "-"} & set(numbers) else stem + numbers for stem, numbers in ranges)


def _ranges(numbers: list[str]) -> list[str]:
    """Return `numbers` (digits, or nothing) as ranges."""
    runs: list[list[str]] = []
    for number in sorted(set(numbers), key=lambda n: (int(n or 0), len(n))):
        if runs and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _bad(text: str, what: str) -> SiteError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return SiteError(what, where=f"host list {shown!r}", hint="write it as Slurm does: n[1-3,5],m7")


def _names(tokens: Iterator[str], end: str, whole: str) -> list[str]:
    """Return the names up to the token `end`: "]" of a bracket, or "" of the whole text."""
    names: list[str] = []
    pieces: list[str | list[str]] = []  # of a name: as it is written, or what a bracket offers
    for token in tokens:
        if token == "[":
            pieces.append(_names(tokens, "]", whole))
        elif token in (",", end):
            if not pieces:
                has_comma = names or token == ","
                raise _bad(whole, "an empty name between commas" if has_comma else "an empty bracket or item")
            names += _expanded(pieces, whole, is_in_bracket=bool(end))
            pieces = []
            if token == end:
                break
        elif token in ("]", ""):
            raise _bad(whole, "'[' without ']'" if end else "']' without '['")
        else:
            pieces.append(token)
    return names


def _expanded(pieces: list[str | list[str]], whole: str, is_in_bracket: bool) -> list[str]:
    """Return all names that `pieces` make side by side; in a bracket a lone ``1-3`` is a range."""
    match = _RANGE.match(pieces[0]) if is_in_bracket and len(pieces) == 1 and isinstance(pieces[0], str) else None
    if match:
        low, high = int(match[1]), int(match[2])
        if high < low or high - low >= MOST_HOSTS:
            raise _bad(whole, f"the range {match[0]} runs backwards or is too long")
        return [str(n).zfill(len(match[1])) for n in range(low, high + 1)]
    choices = [[piece] if isinstance(piece, str) else piece for piece in pieces]
    count = math.prod(map(len, choices))
    if count > MOST_HOSTS:
        raise _bad(whole, f"{count} hosts, more than {MOST_HOSTS}")
    return ["".join(choice) for choice in product(*choices)]
