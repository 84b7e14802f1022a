"""A constraint of node features (``--constraint="nic_ib&(a|b)"``) as a test of one node's features."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"\s*([&|()!]|[\w.:+@/-]+)")
_PYTHON = {"&": "and", "|": "or", "!": "not", "(": "(", ")": ")"}
Test = Callable[[frozenset[str]], bool]


def matcher(constraint: str | None) -> Test | None:
    """Return a test of a node's features for a constraint of features, ``&``, ``|``, ``!`` and round brackets.

    None for counts and square brackets, which only Slurm can evaluate, and for constraints that Slurm would reject."""
    text = (constraint or "").strip()
    if not text:
        return lambda features: True
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        return None
    # Python has these operators with the same precedence; each feature becomes a name.
    names = {f"f{number}": token for number, token in enumerate(tokens) if token not in _PYTHON}
    python_tokens = [_PYTHON.get(token, f"f{number}") for number, token in enumerate(tokens)]
    try:
        return _test(ast.parse(" ".join(python_tokens), mode="eval").body, names)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _test(tree: ast.expr, names: Mapping[str, str]) -> Test:
    """Return the test for a tree of and, or, not and `names` of features. Raises ValueError for other nodes."""
    if isinstance(tree, ast.BoolOp):
        parts, combine = [_test(value, names) for value in tree.values], all if isinstance(tree.op, ast.And) else any
        return lambda features: combine(part(features) for part in parts)
    if isinstance(tree, ast.UnaryOp):
        inner = _test(tree.operand, names)
        return lambda features: not inner(features)
    if isinstance(tree, ast.Name):
        feature = names[tree.id]
        return lambda features: feature in features
    raise ValueError(ast.dump(tree))
