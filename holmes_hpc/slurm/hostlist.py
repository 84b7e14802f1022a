"""Slurm's host lists: :func:`expand` turns ``n[1-3,5],m7`` into host names, :func:`compress` does the reverse."""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import islice, product
from string import digits

from holmes_hpc.errors import SiteError

MAX_HOSTS = 100_000  # a typo such as n[1-99999999] must not fill the memory
_RANGE = re.compile(r"(\d+)-(\d+)\Z")
_PLAIN = re.compile(r"[^\[\],\s]{1,255}\Z")
_TOKEN = re.compile(r"[\[\],]|[^\[\],]+")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(?:(\d{1,9})|.*))?")


def expand(text: str) -> list[str]:
    """Return the hosts of a Slurm host list, in its order. Raise SiteError if it is malformed or too long. If a name
    has several brackets, the last bracket varies fastest. A bracket may hold names or further brackets. The numbers of
    a range are padded to the width of its first number (``[08-10]``)."""
    try:
        return _names(iter([*_TOKEN.findall(text), ""]), "", text) if text else []
    except (RecursionError, ValueError) as e:  # Python's limits on nesting and on digits
        raise _host_list_error(text, "its brackets are nested too deeply, or a number is too long") from e


def numbers(text: str, limit: int = MAX_HOSTS) -> list[int]:
    """Return up to `limit` numbers of a list of tasks or array elements: ``0-2,5`` is [0, 1, 2, 5]."""
    ranges = [(int(m[1]), int(m[2] or m[1])) for m in map(_NUMBERS.fullmatch, text.split(",")) if m]
    return list(islice((n for low, high in ranges for n in range(low, high + 1)), limit))


def compress(hosts: Iterable[str]) -> str:
    """Return the host list of `hosts`, without duplicates. Raise SiteError for a text that is no host name. Names keep
    their order, numbers ascend. Only numbers at the end form ranges, because not every Slurm command accepts others."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for host in hosts:
        if not _PLAIN.match(host):
            raise _host_list_error(host, "a host name is empty, too long, or holds brackets, commas or spaces")
        stem = host.rstrip(digits)
        groups.setdefault((stem, stem == host), []).append(host[len(stem) :])
    ranges = [(stem, ",".join(_ranges(endings))) for (stem, _), endings in groups.items()]
    return ",".join(f"{stem}[{text}]" if "," in text or "-" in text else stem + text for stem, text in ranges)


def _ranges(numbers: list[str]) -> list[str]:
    """Return the ranges of `numbers`: ["1", "2", "5"] gives ["1-2", "5"]. A name without a number has ""."""
    runs: list[list[str]] = []
    for number in sorted(set(numbers), key=lambda n: (int(n or 0), len(n))):
        if runs and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _host_list_error(text: str, message: str) -> SiteError:
    excerpt = text if len(text) <= 60 else text[:57] + "..."
    return SiteError(message, where=f"host list {excerpt!r}", hint="write it as Slurm does: n[1-3,5],m7")


def _names(tokens: Iterator[str], end: str, host_list: str) -> list[str]:
    """Return the host names in `tokens` up to `end` ("]", or "" at the end of the text `host_list`)."""
    names: list[str] = []
    pieces: list[str | list[str]] = []  # of one name: literal text, or a bracket's names
    for token in tokens:
        if token == "[":
            pieces.append(_names(tokens, "]", host_list))
        elif token in (",", end):
            if not pieces:
                problem = "a name is missing beside a comma" if names or token == "," else "an empty bracket"
                raise _host_list_error(host_list, problem)
            names += _expanded(pieces, host_list, is_in_bracket=bool(end))
            pieces = []
            if len(names) > MAX_HOSTS:
                raise _host_list_error(host_list, f"more than {MAX_HOSTS} hosts")
            if token == end:
                break
        elif token in ("]", ""):
            raise _host_list_error(host_list, "'[' without ']'" if end else "']' without '['")
        else:
            pieces.append(token)
    return names


def _expanded(pieces: list[str | list[str]], host_list: str, is_in_bracket: bool) -> list[str]:
    """Return the host names that the pieces of one name form together; a single ``1-3`` in a bracket is a range."""
    match = _RANGE.match(pieces[0]) if is_in_bracket and len(pieces) == 1 and isinstance(pieces[0], str) else None
    if match:
        low, high = int(match[1]), int(match[2])
        if high < low or high - low >= MAX_HOSTS:
            raise _host_list_error(host_list, f"range {match[0]} descends or has more than {MAX_HOSTS} hosts")
        return [str(n).zfill(len(match[1])) for n in range(low, high + 1)]
    choices = [[piece] if isinstance(piece, str) else piece for piece in pieces]
    count = math.prod(map(len, choices))
    if count > MAX_HOSTS:
        raise _host_list_error(host_list, f"{count} hosts, more than {MAX_HOSTS}")
    return ["".join(choice) for choice in product(*choices)]
