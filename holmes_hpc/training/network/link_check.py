"""The check of all links at start: one call per node, and one for the other ranks, over the ranks' key-value store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from holmes_hpc.errors import HolmesError, NetworkError
from holmes_hpc.fabric.finding import Finding, raise_errors
from holmes_hpc.training.network.link_diagnosis import (
    CommunicationGroup,
    Endpoint,
    LinkReport,
    NodeInformation,
    NodeLink,
    audit,
    declared,
    grade,
    peers,
    rounds,
    skewed,
    slow,
    unreachable,
)
from holmes_hpc.training.network.link_sockets import LinkServer, reach, sample
from holmes_hpc.training.network.rendezvous import exchange

if TYPE_CHECKING:
    from torch.distributed import Store

_BASE = "holmes/links"
_DONE = f"{_BASE}/done"


@dataclass(frozen=True)
class Limits:
    """Seconds: to wait for other nodes at each step, for a connection, for a sample and for its repetition."""

    meet_s: float = 30.0
    connect_s: float = 3.0
    sample_s: float = 0.25
    again_s: float = 0.75


def give_up(store: Store, error: HolmesError) -> None:
    """Tell the other nodes why this one cannot take part, so that they need not wait for it."""
    text = json.dumps({"what": error.what, "where": error.where, "hint": error.hint})
    with contextlib.suppress(RuntimeError, TimeoutError):
        for key in (f"{_BASE}/nodes/all", _DONE):
            if not store.check([key]):
                store.set(key, text)


def prove_links(
    store: Store,
    node: str,
    nodes: Sequence[str],
    fabric: str,
    ranks: Sequence[int],
    nics: Mapping[str, Endpoint],
    groups: Sequence[CommunicationGroup],
    token: str,
    limits: Limits = Limits(),
) -> list[Finding]:
    """One rank of each node calls this at the same time. Returns warnings; raises NetworkError on an error.

    `nodes`: all, in rank order; `nics`: ``rdma`` / ``tcp`` -> this node's NIC, not listening yet;
    `groups`: the groups of all ranks; `token`: any text that only this run knows. The outcome is the same on all nodes,
    and is left in the store for :func:`await_links`.
    """
    try:
        with LinkServer(node, token, {k: (nic.interface, nic.address) for k, nic in nics.items()}) as server:
            info = NodeInformation(
                node, fabric, tuple(ranks), {k: replace(nic, port=server.ports[k]) for k, nic in nics.items()}
            )
            found = _Check(store, info, nodes, groups, token, limits).run()
    except NetworkError as e:
        give_up(store, e)
        raise
    if node == nodes[0]:
        store.set(_DONE, json.dumps(None))
    return found


def await_links(store: Store, timeout_s: float = 60.0) -> None:
    """Wait on the other ranks of a node until the check is over; raise its error."""
    try:
        store.wait([_DONE], timedelta(seconds=timeout_s))
    except (RuntimeError, TimeoutError) as e:
        raise NetworkError(
            f"no outcome within {timeout_s:g} s", where="link check", hint="look at the log of each node's first rank"
        ) from e
    error = json.loads(store.get(_DONE))
    if error is not None:
        raise NetworkError(**error)


class _Check:
    def __init__(
        self,
        store: Store,
        own: NodeInformation,
        nodes: Sequence[str],
        groups: Sequence[CommunicationGroup],
        token: str,
        limits: Limits,
    ) -> None:
        self.store, self.own, self.nodes, self.groups = store, own, nodes, groups
        self.token, self.limits = token, limits
        self.node = own.node

    def run(self) -> list[Finding]:
        infos = [msgspec.convert(c, NodeInformation) for c in self._gather("nodes", self.own)]
        odd = audit(infos, self.groups)
        raise_errors(odd)
        by_node = {c.node: c for c in infos}
        reports = self._reports("reached", self._connect(infos, by_node))
        raise_errors(unreachable(infos, reports))
        samples = self._reports("sampled", self._measure(infos, by_node))
        found = odd + slow(infos, samples) + skewed(reports)
        raise_errors(found)
        return found

    def _gather(self, name: str, value: Any) -> list[Any]:
        # a node may spend its whole connection time on dead peers, or repeat a sample, before it comes here
        slack = self.limits.connect_s + 2 * (self.limits.sample_s + self.limits.again_s)
        return exchange(
            self.store,
            f"{_BASE}/{name}",
            self.node,
            self.nodes,
            value,
            where=f"link check ({name})",
            kind="nodes",
            timeout_s=self.limits.meet_s + slack,
        )

    def _reports(self, name: str, own: LinkReport) -> list[LinkReport]:
        return [msgspec.convert(r, LinkReport) for r in self._gather(name, own)]

    def _source(self, kind: str) -> tuple[str, str]:
        nic = self.own.nics[kind]
        return nic.interface, nic.address

    def _connect(self, infos: Sequence[NodeInformation], by_node: Mapping[str, NodeInformation]) -> LinkReport:
        links = {(link.kind, link.receiver): link for link in peers(infos, self.groups, self.node)}
        replies = {
            (kind, other): reply
            for kind in sorted({kind for kind, _ in links})
            for other, reply in reach(
                self._source(kind),
                {receiver: by_node[receiver].nics[kind] for k, receiver in links if k == kind},
                self.token,
                self.limits.connect_s,
            ).items()
        }
        return LinkReport(
            self.node,
            failed=tuple((links[at], reply.failure) for at, reply in replies.items() if reply.failure),
            skew_s={n: round(r.skew_s, 3) for (_, n), r in replies.items() if not r.failure and abs(r.skew_s) > 1},
        )

    def _measure(self, infos: Sequence[NodeInformation], by_node: Mapping[str, NodeInformation]) -> LinkReport:
        measured: list[tuple[NodeLink, float | None]] = []
        order = rounds(infos, self.groups)
        for number, links in enumerate(order):
            for link in links:
                if link.sender == self.node:
                    # whom the receiver sends to in the same ring, unless that is this node
                    onward = (x.receiver for x in links if x.sender == link.receiver and x.receiver != self.node)
                    measured += self._sample(link, by_node, next(onward, None))
            if number + 1 < len(order):
                self._gather(f"round-{number}", None)
        return LinkReport(self.node, (), tuple(measured))

    def _sample(
        self, link: NodeLink, by_node: Mapping[str, NodeInformation], third: str | None
    ) -> list[tuple[NodeLink, float | None]]:
        """Measure a link; where it is slow, once more, and a third node's: is it the sender or the receiver?"""

        def measure(to: str, seconds: float) -> float | None:
            return sample(self._source(link.kind), by_node[to].nics[link.kind], self.token, seconds)

        first = measure(link.receiver, self.limits.sample_s)
        found = [(link, first)]
        if grade(first, declared(by_node, link)) != "ok":
            found.append((link, measure(link.receiver, self.limits.again_s)))
            if third is not None:
                found.append((NodeLink(link.kind, self.node, third, link.label), measure(third, self.limits.sample_s)))
        return found
