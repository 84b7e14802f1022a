"""run.yaml and plan.yaml of many runs, quickly: the runs of a sweep differ in few lines, so each top-level block of a
file is parsed once for each different text of it (YAML parses at about 1 MB/s)."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEY = re.compile(r"^([A-Za-z_]\w*):(?=\s)", re.MULTILINE)
_CUTTABLE = re.compile(r"^(---|\.\.\.|%|\{|\[|\?)|(?:^|\s)[&*]\w+", re.MULTILINE)  # streams, flow, anchors: not cut


@lru_cache(maxsize=20_000)
def _block(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)


def read_blocks(text: str, keys: Collection[str] | None = None) -> Any:
    """The same as a safe YAML load of `text` (a mapping with only `keys`, when given). Callers must not change it:
    blocks of equal text are one object. Raises yaml.YAMLError."""
    starts = [m.start() for m in _KEY.finditer(text)]
    if not starts or _CUTTABLE.search(text):
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
        return {k: v for k, v in data.items() if keys is None or k in keys} if isinstance(data, dict) else data
    result: dict[str, Any] = {}
    if text[:starts[0]].strip():
        result.update(_mapping(text[:starts[0]]))
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        block = text[begin:end]
        name = block[:block.index(":")]
        if keys is None or name in keys:
            result.update(_nested(block) if len(block) > 600 else _mapping(block))
    return result


def _nested(block: str) -> dict[str, Any]:
    """A long block, cut once more at its second level (configurations differ in one group)."""
    head, _, body = block.partition("\n")
    if not head.rstrip().endswith(":") or not re.match(r"  [A-Za-z_]\w*:\s", body):
        return _mapping(block)
    inner = "\n".join(line[2:] for line in body.split("\n"))
    if any(line and not line.startswith("  ") for line in body.split("\n")) or "|" in body or ">" in body:
        return _mapping(block)
    return {head.rstrip()[:-1]: read_blocks(inner)}


def _mapping(text: str) -> dict[str, Any]:
    data = _block(text)
    if not isinstance(data, dict):
        raise yaml.YAMLError("not a mapping")
    return data
