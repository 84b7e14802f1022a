"""Show the parameters that a docstring describes as a list, in the pages that mkdocstrings writes.

A docstring of this project describes parameters in running text: ``path`` in backquotes, a colon, the description. The
keys of a dataclass have their description in the annotation.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_NAME = r"`(\w+)`"
_DESCRIBED = re.compile(rf"(?:^|(?<=[.;]\s))({_NAME}(?:, {_NAME})*):\s+", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod):`~?([^`]*)`")
_AFTER = re.compile(r"\.\s+(?=Raise |Return |Call )")  # a sentence about the function after the last parameter


def with_sections(text: str, names: set[str]) -> str:
    """Return a docstring whose descriptions of the parameters `names` are a section ``Args:``."""
    text = _ROLE.sub(r"`\1`", text)
    starts = [m for m in _DESCRIBED.finditer(text) if set(re.findall(_NAME, m[1])) <= names]
    if not starts:
        return text
    items, end = [], len(text)
    for match in reversed(starts):
        description = text[match.end() : end]
        end = match.start()
        if match is starts[-1]:
            description, *rest = re.split(r"\n\s*\n", description, maxsplit=1)
            description, *sentences = _AFTER.split(description, maxsplit=1)
            after = "\n\n".join([*sentences, *rest])
        line = " ".join(description.split()).rstrip(".;")
        items += [f"    {name}: {line}" for name in reversed(re.findall(_NAME, match[1]))]
    return "\n\n".join(
        part for part in (text[:end].strip(), after.strip(), "\n".join(["Args:", *reversed(items)])) if part
    )


class Parameters(griffe.Extension):
    """The extension of griffe, which reads the code for mkdocstrings."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            func.docstring.value = with_sections(func.docstring.value, {p.name for p in func.parameters})

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if not cls.docstring:
            return
        initializer = cls.members.get("__init__")
        names = {p.name for p in initializer.parameters} if isinstance(initializer, griffe.Function) else set()
        items: list[str] = []
        for name, attribute in cls.attributes.items():
            match attribute.annotation:  # Annotated[TYPE, key("description", …)]
                case griffe.ExprSubscript(
                    slice=griffe.ExprTuple(elements=[kind, griffe.ExprCall(arguments=[text, *_])])
                ):
                    attribute.annotation = kind
                    constant = cls.module.members.get(str(text))  # a text that several keys share
                    value = constant.value if isinstance(constant, griffe.Attribute) else text
                    items.append(f"    {name}: {ast.literal_eval(str(value))}")
        keys = ["\n".join(["Args:", *items])] if items else []
        cls.docstring.value = "\n\n".join([with_sections(cls.docstring.value, names), *keys])
