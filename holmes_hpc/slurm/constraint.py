"""A constraint on node features (``--constraint="nic_ib&(a|b)"``) as a function of one node's features."""

import ast
import contextlib
import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"\s*([&|()!]|[\w.:+@/-]+)")
_PYTHON = {"&": "and", "|": "or", "!": "not", "(": "(", ")": ")"}
Test = Callable[[frozenset[str]], bool]


def matcher(constraint: str | None) -> Test:
    """Return a function that tells whether a node with given features may meet `constraint`. It evaluates features,
    ``&``, ``|``, ``!`` and round brackets. It returns True for every node if the constraint has counts or square
    brackets, which only Slurm can evaluate, or if Slurm would reject the constraint."""
    text = constraint or ""
    tokens = _TOKEN.findall(text)
    # Python has these operators with the same precedence; each feature becomes a name.
    names = {f"f{number}": token for number, token in enumerate(tokens) if token not in _PYTHON}
    python_tokens = [_PYTHON.get(token, f"f{number}") for number, token in enumerate(tokens)]
    with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        if "".join(tokens) == re.sub(r"\s", "", text):
            return _test(ast.parse(" ".join(python_tokens), mode="eval").body, names)
    return lambda features: True


def _test(tree: ast.expr, names: Mapping[str, str]) -> Test:
    """Return the test that a Python expression of ``and``, ``or``, ``not`` and names describes.
    `names`: each name's feature. Raise ValueError for other expressions."""
    if isinstance(tree, ast.BoolOp):
        operands, combine = [_test(value, names) for value in tree.values], all if isinstance(tree.op, ast.And) else any
        return lambda features: combine(operand(features) for operand in operands)
    if isinstance(tree, ast.UnaryOp):
        negated = _test(tree.operand, names)
        return lambda features: not negated(features)
    if isinstance(tree, ast.Name):
        feature = names[tree.id]
        return lambda features: feature in features
    raise ValueError(ast.dump(tree))
