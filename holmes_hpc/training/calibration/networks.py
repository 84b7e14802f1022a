"""Measured times of messages and collectives on each kind of network, and the fit of latency and efficiency.

A link has two numbers, latency and efficiency, as in the planner (planning.cost.timing). A message of b bytes takes
latency + b / (rate * efficiency). A ring collective over k nodes takes k-1 latencies plus the time in which a node
sends its bytes. In each pool, messages and each kind of collective have their own link. Each is fitted to the times of
a small size and of sizes as in training. Between two pools, only messages are measured.
"""

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

from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.fabric.site import FabricLink, Site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.network_figures import Link, collectives
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Transport
from holmes_hpc.training.network import interfaces
from holmes_hpc.training.network.reduce_scatter import reduce_scatter
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.session import Session

WARM_UP, LINK_REPEATS = 2, 9
SMALL_BYTES = 256
MAX_BYTES = 64 << 20  # limit of a message or collective; larger ones give the same efficiency
MAX_SEND_S = 0.4  # limit of the nominal time to send the bytes of one message or collective
EFFICIENCY = (0.001, 1000.0)  # smallest and largest fitted value
Links = dict[str, Link]


@dataclass(frozen=True)
class Sample:
    """A measured time, which the planner's model explains as `steps` * latency + `sent_s` / efficiency. `pools`: the
    pools of the ranks; `link`: the network (local, ib, roce or ethernet), for a collective with its name
    (ib.all_gather); `description`: text for the log; `steps`: the number of latencies in the time; `sent_s`: seconds to
    send the bytes at the nominal rate; `seconds`: the measured time."""

    pools: tuple[str, ...]
    link: str
    description: str
    steps: float
    sent_s: float
    seconds: float


def synchronized_time() -> float:
    """Wait for all work that this rank has launched. Return ``time.perf_counter`` seconds."""
    if torch.cuda.is_initialized():  # only by a session on CUDA
        torch.cuda.synchronize()
    return time.perf_counter()


def link_name(transport: Transport) -> str:
    return "local" if transport.kind == "local" else str(transport.nic)


def nominal_rate(plan: Plan, transport: Transport, ranks: Iterable[int]) -> float:
    """Return the nominal bytes per second of the slowest node (with a local transport: rank) in a ring of `ranks`."""
    return plan.site.slowest_gbps(transport.kind, [plan.places[r].pool for r in ranks]) * 1e9 / 8


@dataclass(frozen=True)
class Pair:
    """Two ranks between which one kind of network is measured. `link`: the kind of network, as in :class:`Sample`;
    `pools`: the one or two pools of these ranks."""

    link: str
    transport: Transport
    ranks: tuple[int, int]
    pools: tuple[str, ...]


class Deadline:
    """A time limit for optional measurements. Ranks measure together, so all must agree to continue."""

    def __init__(self, control: Any, seconds: float) -> None:
        self._control, self._end = control, time.monotonic() + seconds

    def has_time_left(self) -> bool:
        """Return whether all ranks are within the time limit. All ranks call this."""
        is_late = torch.tensor([float(time.monotonic() > self._end)])
        dist.all_reduce(is_late, op=dist.ReduceOp.MAX, group=self._control)
        return not is_late.item()


def pairs(plan: Plan, one_host: bool) -> list[Pair]:
    """Return a pair of ranks for each link to measure. On one host, there is only one such link. Pairs inside a pool
    come first: one for each kind of network, Ethernet included. Then come pairs of ranks in two pools that communicate
    in the plan, to measure the Ethernet between these pools."""
    pool_of_rank = [place.pool for place in plan.places]
    if one_host:
        return [Pair("local", LOCAL, (0, 1), tuple(dict.fromkeys(pool_of_rank)))] if plan.world_size > 1 else []
    rings = [[pool_of_rank[rank] for rank in group.ranks] for group in plan.transports()]
    neighbours = {frozenset(pair) for ring in rings for pair in pairwise(ring) if len({*pair}) == 2}
    pair_of_link: dict[tuple[str, frozenset[str]], Pair] = {}
    for a, b in combinations(range(plan.world_size), 2):
        pools = frozenset((pool_of_rank[a], pool_of_rank[b]))
        names = tuple(dict.fromkeys((pool_of_rank[a], pool_of_rank[b])))
        if len(pools) == 1:
            transport = plan.transport_of((a, b))
            if transport.kind != "rdma" or all("rdma" in interfaces.transport_kinds(plan, r) for r in (a, b)):
                link = link_name(transport)
                pair_of_link.setdefault((link, pools), Pair(link, transport, (a, b), names))
        if pools in neighbours or (len(pools) == 1 and plan.places[a] != plan.places[b]):
            pair_of_link.setdefault(("ethernet", pools), Pair("ethernet", TCP, (a, b), names))
    return sorted(pair_of_link.values(), key=lambda p: len(p.pools))


def measure_links(session: Session, control: Any, deadline: Deadline) -> list[tuple[Any, ...]]:
    """Measure all links. Return this rank's :class:`Sample` objects as tuples. All ranks call this. Only the first rank
    of a pair or data-parallel group returns its samples. After the deadline, Ethernet between pools is left out."""
    plan, rank = session.plan, session.launch.rank
    elements = plan.parts.micro_size * plan.parts.sequence_length * plan.model.hidden  # of one stage transfer
    max_bytes = min(MAX_BYTES, elements * (2 if session.cuda else 4))
    samples: list[Sample] = []
    for pair in pairs(plan, session.node_of_rank[0].one_host):
        if len(pair.pools) == 2 and pair.link == "ethernet" and not deadline.has_time_left():
            log_line(f"time limit reached: link between {' and '.join(pair.pools)} not measured")
            continue
        name = f"ping-pong {pair.link} {' '.join(pair.pools)}"
        group = session.groups.new(pair.ranks, name, transport=pair.transport)
        _all_reduce(control)
        if rank in pair.ranks:
            speed = nominal_rate(plan, pair.transport, pair.ranks)
            for size in (SMALL_BYTES, max(2 * SMALL_BYTES, min(max_bytes, int(MAX_SEND_S * speed)))):
                seconds = _median_s(_ping_pong(session, group, pair.ranks, size)) / 2
                if rank == pair.ranks[0]:
                    samples.append(Sample(pair.pools, pair.link, f"message of {size} bytes", 1, size / speed, seconds))
    _all_reduce(control)
    samples += _measure_collectives(session)
    _all_reduce(control)
    return [astuple(sample) for sample in samples]


def all_reduce_s(control: Any) -> float:
    """Return the median seconds of an all-reduce of one number, such as the gradient norm. All ranks call this."""
    return _median_s(partial(_all_reduce, control))


def _all_reduce(control: Any) -> None:
    dist.all_reduce(torch.zeros(1), group=control)


def _median_s(task: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + LINK_REPEATS):
        start = synchronized_time()
        task()
        times.append(synchronized_time() - start)
    return statistics.median(times[WARM_UP:])


def _ping_pong(session: Session, group: Any, ranks: tuple[int, int], size: int) -> Callable[[], None]:
    """Return a task that exchanges two messages of `size` bytes between the two `ranks`, one after the other."""
    data = torch.zeros(size // 4, device=session.device)
    is_first = session.launch.rank == ranks[0]
    peer = ranks[1] if is_first else ranks[0]

    def task() -> None:
        for is_sender in (is_first, not is_first):
            if is_sender:
                dist.send(data, peer, group=group)
            else:
                dist.recv(data, peer, group=group)

    return task


def _measure_collectives(session: Session) -> list[Sample]:
    """Measure reduce-scatter and all-gather of at most a gradient bucket, in all data-parallel groups in parallel."""
    plan, p = session.plan, session.plan.parallel
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or p.optimizer_instances > 1:
        return []
    transport = LOCAL if session.node_of_rank[0].one_host else plan.transport_of(ranks)
    nodes = 1 if transport == LOCAL else len({plan.places[r] for r in ranks})
    if 1 < nodes < len(ranks):
        return []  # the time would include traffic inside the nodes
    gpu = plan.site.pool(plan.places[ranks[0]].pool).gpu
    algorithms, speed, link = collectives(gpu), nominal_rate(plan, transport, ranks), link_name(transport)
    senders = 1 if nodes == 1 else p.tp  # the TP ranks of a node send at the same time
    n, samples = len(ranks), []
    function: Callable[..., Any] = reduce_scatter if algorithms.is_all_to_all(n, nodes) else dist.reduce_scatter_tensor
    pools = tuple(dict.fromkeys(plan.places[r].pool for r in ranks))
    max_bytes = min(MAX_BYTES, plan.bucket_bytes, int(MAX_SEND_S * speed))  # all groups wait for the slowest network
    for size in (SMALL_BYTES, max_bytes // 2, max_bytes):
        full = torch.zeros(max(1, size // 4 // n) * n, device=session.device)
        shard = torch.zeros(len(full) // n, device=session.device)
        reduce = partial(function, shard, full, dist.ReduceOp.SUM, group, False)
        gather = partial(dist.all_gather_into_tensor, full, shard, group=group)
        for collective, factor, fill, call in (
            ("reduce_scatter", algorithms.reduce_scatter(n, nodes), 0.0, reduce),
            ("all_gather", algorithms.all_gather, algorithms.gather_fill, gather),
        ):
            sent_s = factor * (n - 1 + fill) / n * len(full) * 4 * senders / speed  # as in planning.cost.network_times
            text, steps = f"{len(full) * 4} bytes over {n} ranks", factor * (n - 1)
            samples.append(Sample(pools, f"{link}.{collective}", text, steps, sent_s, _median_s(call)))
    return samples if session.launch.rank == ranks[0] else []


FittedLinks = dict[tuple[tuple[str, ...], str], Link]  # by (pools, link) of the samples


def fitted_s(sample: Sample, fitted: FittedLinks) -> float:
    """Return the seconds that the fitted link predicts for `sample`."""
    link = fitted[sample.pools, sample.link]
    return sample.steps * link.latency_s + sample.sent_s / link.efficiency


def fit(samples: Iterable[Sample]) -> FittedLinks:
    """Fit latency and efficiency of each link by least squares of the relative errors."""
    return {key: _fit_link(link_samples) for key, link_samples in grouped(((s.pools, s.link), s) for s in samples)}


def links_of_pools(fitted: FittedLinks) -> dict[str, Links]:
    """Return {pool: {name of the link: link}}. If Ethernet was measured inside no pool, the two pools with the lowest
    Ethernet latency between them both get the link between them as their Ethernet, and other pools have none."""
    links: dict[str, Links] = {}
    rows = sorted(fitted.items(), key=lambda row: (len(row[0][0]), row[1].latency_s))
    lacks_ethernet = not any(len(pools) == 1 and name == "ethernet" for pools, name in fitted)
    for (pools, name), link in rows:
        if len(pools) == 2 and name == "ethernet":
            if not lacks_ethernet:
                continue
            lacks_ethernet = False
        for pool in pools:
            links.setdefault(pool, {}).setdefault(name, link)  # links inside one pool come first in rows
    return links


def links_between_fabrics(fitted: FittedLinks, calibration: Calibration, site: Site) -> tuple[FabricLink, ...]:
    """Return rate and delay between fabrics, as a site file has them. The planner multiplies the rate by the efficiency
    of the pools' own Ethernet in `calibration`. The rate is chosen so that this product gives the measured time. The
    delay is the latency beyond the mean latency of that Ethernet."""
    fabric_links = []
    for (pool_names, network), link in fitted.items():
        if len(pool_names) != 2 or network != "ethernet":
            continue
        pools = [site.pool(name) for name in pool_names]
        if pools[0].fabric_name == pools[1].fabric_name:
            continue
        ethernet = [calibration.link(pool, "ethernet") or link for pool in pools]
        gbps = site.slowest_gbps("tcp", pool_names) * link.efficiency / min(e.efficiency for e in ethernet)
        delay_ms = max(0.0, link.latency_s - statistics.mean(e.latency_s for e in ethernet)) * 1e3
        fabric_links.append(FabricLink(tuple(p.fabric_name for p in pools), float(f"{gbps:.4g}"), round(delay_ms, 3)))
    return tuple(fabric_links)


def _fit_link(samples: list[Sample]) -> Link:
    """Fit latency >= 0 and efficiency: minimize sum((steps*latency + sent_s/efficiency)/seconds - 1)^2."""
    a = [s.steps / s.seconds for s in samples]
    b = [s.sent_s / s.seconds for s in samples]
    aa, bb = sum(x * x for x in a), sum(x * x for x in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    determinant = aa * bb - ab * ab
    slowness = (sum(b) * aa - sum(a) * ab) / determinant if determinant > 1e-12 * aa * bb else sum(b) / bb
    low, high = 1 / EFFICIENCY[1], 1 / EFFICIENCY[0]
    latency = (sum(a) - min(max(slowness, low), high) * ab) / aa
    if latency < 0:
        latency, slowness = 0.0, sum(b) / bb
    return Link(latency, 1 / min(max(slowness, low), high))
