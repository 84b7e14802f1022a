"""Slurm's nodes, each with the meaning of its features."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from holmes_hpc.fabric.features import Reading, read_features, read_vocabulary
from holmes_hpc.slurm import scontrol
from holmes_hpc.slurm.scontrol import Node

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class SiteNode(Node):
    """A node of Slurm. `reading`: the meaning of its active features."""

    reading: Reading = field(kw_only=True)


def with_reading(node: Node, vocabulary: str | None = None) -> SiteNode:
    """Return `node` with its features interpreted. `vocabulary`: the site's own file of features."""
    return SiteNode(**vars(node), reading=read_features(node.features, read_vocabulary(vocabulary)))


def read_nodes(vocabulary: str | None = None) -> list[SiteNode]:
    """Return all nodes of this Slurm, usable or not, in its order."""
    return [with_reading(node, vocabulary) for node in scontrol.read_nodes()]


def grouped(pairs: Iterable[tuple[K, V]]) -> list[tuple[K, list[V]]]:
    """Return (key, its values) for each key, in the order in which keys first appear."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return list(groups.items())
