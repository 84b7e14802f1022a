"""The check of all links at start. One rank per node runs it; the nodes coordinate through the key-value store."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from holmes_hpc.errors import HolmesError, NetworkError
from holmes_hpc.fabric.finding import Finding, raise_errors
from holmes_hpc.training.network import link_diagnosis as diagnosis
from holmes_hpc.training.network.exchange import exchange, set_outcome
from holmes_hpc.training.network.link_diagnosis import CommunicationGroup, LinkReport, NodeInformation, NodeLink
from holmes_hpc.training.network.link_sockets import LinkServer, Reply, reach, sample

_BASE = "holmes/links"
_DONE = f"{_BASE}/done"


@dataclass(frozen=True)
class Limits:
    """Durations in seconds. `join_s`: the longest wait for other nodes in one exchange; `connect_s`: the longest
    attempt to connect to peers; `sample_s`: the length of a sample; `repeat_s`: the length of a repeated sample."""

    join_s: float = 30.0
    connect_s: float = 3.0
    sample_s: float = 0.25
    repeat_s: float = 0.75


def publish_error(store: dist.Store, error: HolmesError) -> None:
    """Publish this node's error as the outcome of the check, so that the other nodes do not wait for this one."""
    arguments = {"what": error.what, "where": error.where, "hint": error.hint}
    with contextlib.suppress(RuntimeError, TimeoutError):
        if not store.check([f"{_BASE}/nodes/all"]):
            set_outcome(store, f"{_BASE}/nodes", None, arguments)
        if not store.check([_DONE]):
            store.set(_DONE, json.dumps(arguments))


def run_link_check(
    store: dist.Store,
    info: NodeInformation,
    nodes: Sequence[str],
    groups: Sequence[CommunicationGroup],
    token: str,
    limits: Limits = Limits(),
) -> list[Finding]:
    """Check all links together with the other nodes. One rank of each node calls it. Return warnings.

    `info`: the information of this node, without the ports of its link server; `nodes`: the names of all nodes, in rank
    order; `groups`: the groups of all ranks; `token`: any text that only this run knows. On errors, raise the same
    NetworkError on all nodes, for the first error. The outcome is stored for :func:`await_link_check`.
    """
    try:
        with LinkServer(info.node, token, info.nics) as server:
            nics = {kind: replace(nic, port=server.ports[kind]) for kind, nic in info.nics.items()}
            findings = _LinkCheck(store, replace(info, nics=nics), nodes, groups, token, limits).run()
    except NetworkError as e:
        publish_error(store, e)
        raise
    if info.node == nodes[0]:
        store.set(_DONE, json.dumps(None))
    return findings


def await_link_check(store: dist.Store, timeout_s: float = 60.0) -> None:
    """Wait until the check is over. The ranks of a node that do not run the check call this function.
    Raise NetworkError if the check failed or took too long."""
    errors, what = (RuntimeError, TimeoutError), f"no outcome within {timeout_s:g} s"
    hint = "look at the log of each node's first rank"
    with NetworkError.instead_of(*errors, where="link check", hint=hint, what=what):
        store.wait([_DONE], timedelta(seconds=timeout_s))
    error = json.loads(store.get(_DONE))
    if error is not None:
        raise NetworkError(**error)


@dataclass(frozen=True)
class _LinkCheck:
    """One node's part of the check; `info`: the data that the node publishes."""

    store: dist.Store
    info: NodeInformation
    nodes: Sequence[str]
    groups: Sequence[CommunicationGroup]
    token: str
    limits: Limits

    @property
    def node(self) -> str:
        return self.info.node

    def run(self) -> list[Finding]:
        infos = [msgspec.convert(data, NodeInformation) for data in self._gather("nodes", self.info)]
        node_faults = diagnosis.find_node_faults(infos, self.groups)
        raise_errors(node_faults)
        by_node = {info.node: info for info in infos}
        reports = self._gather_reports("reached", self._connect(infos, by_node))
        raise_errors(diagnosis.find_unreachable(infos, reports))
        samples = self._gather_reports("sampled", self._measure(infos, by_node))
        findings = node_faults + diagnosis.find_slow_links(infos, samples) + diagnosis.find_clock_skew(reports)
        raise_errors(findings)
        return findings

    def _gather(self, name: str, value: Any) -> list[Any]:
        # Before this call a node may spend its whole connection time on dead peers, or repeat a sample.
        slack_s = self.limits.connect_s + 2 * (self.limits.sample_s + self.limits.repeat_s)
        key, where, timeout_s = f"{_BASE}/{name}", f"link check ({name})", self.limits.join_s + slack_s
        return exchange(self.store, key, self.node, self.nodes, value, where=where, kind="nodes", timeout_s=timeout_s)

    def _gather_reports(self, name: str, report: LinkReport) -> list[LinkReport]:
        return [msgspec.convert(r, LinkReport) for r in self._gather(name, report)]

    def _connect(self, infos: Sequence[NodeInformation], by_node: Mapping[str, NodeInformation]) -> LinkReport:
        links = {(link.kind, link.receiver): link for link in diagnosis.peer_links(infos, self.groups, self.node)}
        replies = dict[tuple[str, str], Reply]()
        for kind in sorted({kind for kind, _ in links}):
            targets = {receiver: by_node[receiver].nics[kind] for k, receiver in links if k == kind}
            found = reach(self.info.nics[kind], targets, self.token, self.limits.connect_s)
            replies |= {(kind, peer): reply for peer, reply in found.items()}
        return LinkReport(
            self.node,
            failed=tuple((links[key], reply.failure) for key, reply in replies.items() if reply.failure),
            skew_s={n: round(r.skew_s, 3) for (_, n), r in replies.items() if not r.failure and abs(r.skew_s) > 1},
        )

    def _measure(self, infos: Sequence[NodeInformation], by_node: Mapping[str, NodeInformation]) -> LinkReport:
        measured: list[tuple[NodeLink, float | None]] = []
        rounds = diagnosis.measurement_rounds(infos, self.groups)
        for number, links in enumerate(rounds):
            for link in (link for link in links if link.sender == self.node):
                # the node to which the receiver sends in the same round, unless it is this node
                next_receivers = (x.receiver for x in links if x.sender == link.receiver and x.receiver != self.node)
                measured += self._sample(link, by_node, next(next_receivers, None))
            if number + 1 < len(rounds):
                self._gather(f"round-{number}", None)
        return LinkReport(self.node, (), tuple(measured))

    def _sample(
        self, link: NodeLink, by_node: Mapping[str, NodeInformation], third: str | None
    ) -> list[tuple[NodeLink, float | None]]:
        """Measure a link and return (link, Gb/s). If the link is slow, repeat the measurement. Then also measure the
        link from this node to a `third` node, which shows whether the sender or the receiver is slow."""

        def measure(receiver: str, seconds: float) -> float | None:
            return sample(self.info.nics[link.kind], by_node[receiver].nics[link.kind], self.token, seconds)

        gbps = measure(link.receiver, self.limits.sample_s)
        samples = [(link, gbps)]
        if diagnosis.grade(gbps, diagnosis.declared_gbps(by_node, link)) != "ok":
            samples.append((link, measure(link.receiver, self.limits.repeat_s)))
            if third is not None:
                other = NodeLink(link.kind, self.node, third, link.label)
                samples.append((other, measure(third, self.limits.sample_s)))
        return samples
