"""Strategies for almost valid documents: they change a valid one in a few places and keep its structure."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

UNUSUAL = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 9, 2**31, 2**63, 10**30, -(10**30), 10**400]),
    st.sampled_from([0.0, -0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")]),
    st.sampled_from(
        [
            "",
            " ",
            "x",
            "0",
            "-1",
            "1e9",
            "nan",
            "a\nb",
            "\x1b[31m",
            "\x00",
            "../..",
            "/etc/passwd",
            "a" * 300,
            "ib1",
            "ib[1-3]",
            "ib[1-",
            "$(id)",
            "<b>",
            "٣",
            "²",
            "\ud800",
            "🙂",
            "2025-13-45T99:00:00",
        ]
    ),
    st.sampled_from([[], {}, [[]], [None], {"": None}, {"kind": []}, [0, "x"], {"a": {"b": [1]}}, {1: 2}]),
)
FRAGMENTS = [
    "",
    "=",
    ":",
    "[",
    "]",
    "[1-",
    "]]",
    "+",
    "\x1f",
    "\n",
    "\x00",
    "-",
    ",",
    "(null)",
    "0:x",
    "x:0",
    "9" * 20,
    "None",
    "²",
    "\x1b[2J",
    "{",
    "'",
]


def _paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a document."""
    paths = [path] if path else []
    parts = list(document.items()) if isinstance(document, dict) else []
    for key, value in parts or (enumerate(document) if isinstance(document, list) else []):
        paths += _paths(value, (*path, key))
    return paths


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """Draw `document` with one to three of its parts replaced, removed, duplicated, renamed or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        paths = _paths(document)
        if not paths:
            return document
        *parents, leaf = draw(st.sampled_from(paths))
        holder = document
        for key in parents:
            holder = holder[key]
        mutation = draw(st.sampled_from(["replace", "replace", "remove", "double", "rename", "exchange"]))
        if mutation == "remove":
            del holder[leaf]
        elif mutation == "double" and isinstance(holder, list):
            holder.insert(leaf, copy.deepcopy(holder[leaf]))
        elif mutation == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["x", "", 7, "kind", "name", "version"]))] = holder.pop(leaf)
        elif mutation == "exchange":
            source = document
            for key in draw(st.sampled_from(paths)):
                source = (
                    source[key] if isinstance(source, list) or (isinstance(source, dict) and key in source) else source
                )
            holder[leaf] = copy.deepcopy(source)
        else:
            holder[leaf] = copy.deepcopy(draw(UNUSUAL))  # all examples share the drawn object
    return document


@st.composite
def changed_text(draw: st.DrawFn, text: str) -> str:
    """Draw `text` with pieces removed, duplicated, or replaced by output of programs and typos."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        piece = draw(st.one_of(st.sampled_from(FRAGMENTS), st.just(text[start:end] * 2), st.text(max_size=5)))
        text = text[:start] + piece + text[end:]
    return text
