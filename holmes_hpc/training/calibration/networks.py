"""How long messages and collectives take on each kind of network, and the latency and efficiency that explain it.

A link is two numbers, as the planner uses them (planning.timing): a message of b bytes takes latency + b / (rate *
efficiency); a ring collective over k nodes takes its k-1 steps' latencies, and what a node sends. Messages and each
collective have a link of their own on each fabric, fitted to their times at a small size and at those that training
uses. Between two fabrics messages alone are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from holmes_hpc.fabric.site import FabricLink, Site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.hardware import Link, collectives
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Transport
from holmes_hpc.training.network import interfaces
from holmes_hpc.training.rank.log import say
from holmes_hpc.training.session import Session

WARM_UP, REPEATS = 2, 9
SMALL_BYTES = 256
MOST_BYTES = 64 << 20  # of one message or collective: larger ones tell nothing new
MOST_S = 0.4  # that a network needs for the bytes of one message or collective
EFFICIENCY = (0.001, 1000.0)
Links = dict[str, Link]


@dataclass(frozen=True)
class Sample:
    """`seconds` that something took which, by the planner's model, has `steps` latencies and `sent_s` seconds of
    sending at the nominal rate. `fabrics`: of the ranks. `link`: local, ib, roce, ethernet; those of collectives as
    ib.all_gather."""

    fabrics: tuple[str, ...]
    link: str
    what: str
    steps: float
    sent_s: float
    seconds: float


def moment() -> float:
    """The time when all that this rank has started is done."""
    if torch.cuda.is_initialized():  # only a session on CUDA does that
        torch.cuda.synchronize()
    return time.perf_counter()


def link_name(transport: Transport) -> str:
    return "local" if transport.kind == "local" else str(transport.nic)


def rate(plan: Plan, transport: Transport, ranks: Iterable[int]) -> float:
    """Return the nominal bytes per second of one node (locally: of one rank), the slowest in a ring of `ranks`."""
    return plan.site.slowest_gbps(transport.kind, [plan.places[r].fabric for r in ranks]) * 1e9 / 8


@dataclass(frozen=True)
class Pair:
    """Two ranks that reach each other by a kind of network: of one fabric, or of two `fabrics` that exchange
    something."""

    link: str
    transport: Transport
    ranks: tuple[int, int]
    fabrics: tuple[str, ...]


class Deadline:
    """The end of the time for what may be left out. Ranks measure together, so all of them must agree to go on."""

    def __init__(self, control: Any, seconds: float) -> None:
        self._control, self._end = control, time.monotonic() + seconds

    def left(self) -> bool:
        """Whether no rank is past its end. All ranks call it."""
        late = torch.tensor([float(time.monotonic() > self._end)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self._control)
        return not late.item()


def pairs(plan: Plan, one_host: bool) -> list[Pair]:
    """Two ranks for every kind of network that a fabric of the plan has, its Ethernet always, then for every two
    fabrics that exchange something. On one host there is but one kind of network."""
    fabric = [place.fabric for place in plan.places]
    if one_host:
        return [Pair("local", LOCAL, (0, 1), tuple(dict.fromkeys(fabric)))] if plan.world_size > 1 else []
    rings = [[fabric[rank] for rank in group.ranks] for group in plan.transports()]
    met = {frozenset(two) for ring in rings for two in pairwise(ring) if len({*two}) == 2}  # next to each other
    found: dict[tuple[str, frozenset[str]], Pair] = {}
    for a, b in combinations(range(plan.world_size), 2):
        here = frozenset((fabric[a], fabric[b]))
        names = tuple(dict.fromkeys((fabric[a], fabric[b])))
        if len(here) == 1:
            own = plan.transport_of((a, b))
            if own.kind != "rdma" or all("rdma" in interfaces.transport_kinds(plan, r) for r in (a, b)):
                found.setdefault((link_name(own), here), Pair(link_name(own), own, (a, b), names))
        if here in met or (len(here) == 1 and plan.places[a] != plan.places[b]):
            found.setdefault(("ethernet", here), Pair("ethernet", TCP, (a, b), names))
    return sorted(found.values(), key=lambda p: len(p.fabrics))


def samples(here: Session, control: Any, deadline: Deadline) -> list[tuple[Any, ...]]:
    """This rank's :class:`Sample` rows: of messages from the first rank of each pair, of collectives from every rank of
    a data-parallel group. All ranks call it. Past the deadline, networks between fabrics are left out."""
    plan = here.plan
    elements = plan.batch.micro_size * plan.batch.sequence_length * plan.model.hidden  # of one stage transfer
    most_bytes = min(MOST_BYTES, elements * (2 if here.cuda else 4))
    found: list[Sample] = []
    for pair in pairs(plan, here.nodes[0].one_host):
        if len(pair.fabrics) == 2 and pair.link == "ethernet" and not deadline.left():
            say(f"no time was left to measure between {' and '.join(pair.fabrics)}")
            continue
        group = here.groups.new(pair.ranks, f"ping-pong {pair.link} {' '.join(pair.fabrics)}", transport=pair.transport)
        _meet(control)
        if here.launch.rank in pair.ranks:
            speed = rate(plan, pair.transport, pair.ranks)
            for size in (SMALL_BYTES, max(2 * SMALL_BYTES, min(most_bytes, int(MOST_S * speed)))):
                seconds = _median_s(_exchange(here, group, pair.ranks, size)) / 2
                if here.launch.rank == pair.ranks[0]:
                    found.append(
                        Sample(pair.fabrics, pair.link, f"a message of {size} bytes", 1, size / speed, seconds)
                    )
    _meet(control)
    found += _collectives(here)
    _meet(control)
    return [astuple(s) for s in found]


def meeting_s(control: Any) -> float:
    """What it takes all ranks to sum up one number, as they do for the gradient norm. All ranks call it."""
    return _median_s(partial(_meet, control))


def _meet(control: Any) -> None:
    dist.all_reduce(torch.zeros(1), group=control)


def _median_s(task: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        began = moment()
        task()
        times.append(moment() - began)
    return statistics.median(times[WARM_UP:])


def _exchange(here: Session, group: Any, ranks: tuple[int, int], size: int) -> Callable[[], None]:
    """There and back: twice the time of one message."""
    data = torch.zeros(size // 4, device=here.device)
    first = here.launch.rank == ranks[0]
    other = ranks[1] if first else ranks[0]

    def task() -> None:
        for sending in (first, not first):
            if sending:
                dist.send(data, other, group=group)
            else:
                dist.recv(data, other, group=group)

    return task


def _collectives(here: Session) -> list[Sample]:
    """Reduce-scatter and all-gather of a gradient bucket, and of some more, in every data-parallel group at once."""
    plan, p = here.plan, here.plan.parallel
    group = parallel_state.get_data_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or p.optimizer_instances > 1:
        return []
    transport = LOCAL if here.nodes[0].one_host else plan.transport_of(ranks)
    nodes = 1 if transport == LOCAL else len({plan.places[r] for r in ranks})
    if 1 < nodes < len(ranks):
        return []  # time inside the nodes would count as the network's
    gpu = plan.site.fabric(plan.places[ranks[0]].fabric).gpu
    how, speed, name = collectives(gpu), rate(plan, transport, ranks), link_name(transport)
    sharing = 1 if nodes == 1 else p.tp  # TP ranks of a node send beside each other
    n, found = len(ranks), []
    fabrics = tuple(dict.fromkeys(plan.places[r].fabric for r in ranks))
    most = min(MOST_BYTES, plan.bucket_bytes, int(MOST_S * speed))  # the other groups wait for the slowest network
    for size in (SMALL_BYTES, most // 2, most):
        whole = torch.zeros(max(1, size // 4 // n) * n, device=here.device)
        part = torch.zeros(len(whole) // n, device=here.device)
        for what, factor, fill, task in (
            (
                "reduce_scatter",
                how.reduce_scatter,
                0.0,
                lambda w=whole, s=part: dist.reduce_scatter_tensor(s, w, group=group),
            ),
            (
                "all_gather",
                how.all_gather,
                how.gather_fill,
                lambda w=whole, s=part: dist.all_gather_into_tensor(w, s, group=group),
            ),
        ):
            seconds = _median_s(task)
            sent_s = factor * (n - 1 + fill) / n * len(whole) * 4 * sharing / speed
            found.append(
                Sample(
                    fabrics,
                    f"{name}.{what}",
                    f"{len(whole) * 4} bytes over {n} ranks",
                    factor * (n - 1),
                    sent_s,
                    seconds,
                )
            )
    return found if here.launch.rank == ranks[0] else []


# -- the fit ----------------------------------------------------------------------------------------------------------


Fitted = dict[tuple[tuple[str, ...], str], Link]  # (fabrics, link) of samples


def fitted_s(sample: Sample, found: Fitted) -> float:
    """What `sample` takes by the fitted link."""
    link = found[sample.fabrics, sample.link]
    return sample.steps * link.latency_s + sample.sent_s / link.efficiency


def fit(found: Iterable[Sample]) -> Fitted:
    """Latency and efficiency of each link: least squares of the relative errors."""
    rows: dict[tuple[tuple[str, ...], str], list[Sample]] = {}
    for sample in found:
        rows.setdefault((sample.fabrics, sample.link), []).append(sample)
    return {key: _fit(own) for key, own in rows.items()}


def of_fabrics(found: Fitted) -> dict[str, Links]:
    """The links of each fabric. Where no fabric has two nodes, Ethernet is what the quickest two have between them."""
    links: dict[str, Links] = {}
    rows = sorted(found.items(), key=lambda row: (len(row[0][0]), row[1].latency_s))
    alone = not any(len(fabrics) == 1 and name == "ethernet" for fabrics, name in found)
    for (fabrics, name), link in rows:
        if len(fabrics) == 2 and name == "ethernet":
            if not alone:
                continue
            alone = False
        for fabric in fabrics:
            links.setdefault(fabric, {}).setdefault(name, link)  # its own before one of several fabrics
    return links


def between(found: Fitted, known: Calibration, site: Site) -> tuple[FabricLink, ...]:
    """What two fabrics have between them, as a site file says it: the rate that, at the efficiency of their own
    Ethernet by `known`, gives what was measured, and the delay beyond their own Ethernet's."""
    made = []
    for (fabrics, name), link in found.items():
        if len(fabrics) != 2 or name != "ethernet":
            continue
        ends = [site.fabric(f) for f in fabrics]
        own = [known.link(f, "ethernet") or link for f in ends]
        gbps = site.slowest_gbps("tcp", fabrics) * link.efficiency / min(o.efficiency for o in own)
        delay_ms = max(0.0, link.latency_s - statistics.mean(o.latency_s for o in own)) * 1e3
        made.append(FabricLink(fabrics, float(f"{gbps:.4g}"), round(delay_ms, 3)))
    return tuple(made)


def _fit(rows: list[Sample]) -> Link:
    """Minimise sum((steps*latency + sent_s*slowness)/seconds - 1)^2 over latency >= 0 and the allowed slowness."""
    a = [s.steps / s.seconds for s in rows]
    b = [s.sent_s / s.seconds for s in rows]
    aa, bb = sum(x * x for x in a), sum(x * x for x in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    determinant = aa * bb - ab * ab
    slowness = (sum(b) * aa - sum(a) * ab) / determinant if determinant > 1e-12 * aa * bb else sum(b) / bb
    low, high = 1 / EFFICIENCY[1], 1 / EFFICIENCY[0]
    latency = (sum(a) - min(max(slowness, low), high) * ab) / aa
    if latency < 0:
        latency, slowness = 0.0, sum(b) / bb
    return Link(latency, 1 / min(max(slowness, low), high))
