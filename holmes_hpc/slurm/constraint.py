"""A constraint of node features (``--constraint="nic_ib&(a|b)"``) as a test of one node's features."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*([&|()!]|[\w.:+@/-]+)")
Test = Callable[[frozenset[str]], bool]


def matcher(constraint: str | None) -> Test | None:
    """A constraint of features, ``&``, ``|``, ``!`` and round brackets as a test of a node's features; None for what
    has counts or square brackets, which only Slurm can judge."""
    text = (constraint or "").strip()
    if not text:
        return lambda features: True
    if re.search(r"[\[\]*,]", text):
        return None
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        return None

    def either(at: int) -> tuple[Test, int]:
        left, at = both(at)
        while at < len(tokens) and tokens[at] == "|":
            first = left
            second, at = both(at + 1)
            left = _or(first, second)
        return left, at

    def both(at: int) -> tuple[Test, int]:
        left, at = one(at)
        while at < len(tokens) and tokens[at] == "&":
            first = left
            second, at = one(at + 1)
            left = _and(first, second)
        return left, at

    def one(at: int) -> tuple[Test, int]:
        token = tokens[at]
        if token == "!":
            inner, at = one(at + 1)
            return (lambda features: not inner(features)), at
        if token == "(":
            inner, at = either(at + 1)
            if tokens[at] != ")":
                raise ValueError(text)
            return inner, at + 1
        if token in "&|)":
            raise ValueError(text)
        return (lambda features: token in features), at + 1

    try:
        test, end = either(0)
    except (IndexError, ValueError):
        return None
    return test if end == len(tokens) else None


def _or(a: Test, b: Test) -> Test:
    return lambda features: a(features) or b(features)


def _and(a: Test, b: Test) -> Test:
    return lambda features: a(features) and b(features)
