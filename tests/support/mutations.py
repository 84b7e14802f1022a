"""Documents that are almost right: strategies that change a valid one in a few places, keeping its structure."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

ODD = st.one_of(
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
WORDS = [
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


def _places(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all parts of a document."""
    found = [at] if at else []
    parts = list(document.items()) if isinstance(document, dict) else []
    for key, value in parts or (enumerate(document) if isinstance(document, list) else []):
        found += _places(value, (*at, key))
    return found


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """`document` with one to three of its parts replaced, left out, doubled, renamed or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(document)
        if not places:
            return document
        *way, last = draw(st.sampled_from(places))
        holder = document
        for key in way:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "remove", "double", "rename", "exchange"]))
        if how == "remove":
            del holder[last]
        elif how == "double" and isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["x", "", 7, "kind", "name", "version"]))] = holder.pop(last)
        elif how == "exchange":
            other = document
            for key in draw(st.sampled_from(places)):
                other = other[key] if isinstance(other, list) or (isinstance(other, dict) and key in other) else other
            holder[last] = copy.deepcopy(other)
        else:
            holder[last] = copy.deepcopy(draw(ODD))  # what is drawn is shared by all examples
    return document


@st.composite
def changed_text(draw: st.DrawFn, text: str) -> str:
    """`text` with pieces cut out, doubled, or replaced by what programs write and people mistype."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        piece = draw(st.one_of(st.sampled_from(WORDS), st.just(text[start:end] * 2), st.text(max_size=5)))
        text = text[:start] + piece + text[end:]
    return text
