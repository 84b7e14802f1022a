"""Bytes that the NICs counted against those that the plan expects: which NIC carries what it should not, for whom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holmes_hpc.fabric.finding import Finding

TOLERANCE = 0.10
FLOOR_BYTES = 1_000_000  # per step: rendezvous, heartbeats, name look-ups


@dataclass(frozen=True)
class Load:
    """What one group makes a node send in one step: payload `bytes` over a `kind` of NIC (ib, roce, ethernet)."""

    node: str
    kind: str
    label: str
    bytes: float


def expected(loads: Iterable[Load], header_factor: float = 1.0) -> dict[str, dict[str, float]]:
    """Node -> kind of NIC -> bytes per step on the wire."""
    totals: dict[str, dict[str, float]] = {}
    for load in loads:
        kinds = totals.setdefault(load.node, {})
        kinds[load.kind] = kinds.get(load.kind, 0.0) + load.bytes * header_factor
    return totals


def audit_bytes(
    counted: Mapping[str, Mapping[str, float]],
    loads: Iterable[Load],
    header_factor: float = 1.0,
    names: Mapping[str, Mapping[str, str]] | None = None,
    tolerance: float = TOLERANCE,
    floor_bytes: float = FLOOR_BYTES,
    own: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Finding]:
    """An error for every NIC that sends more than it should, with the group the surplus probably comes from: the one
    that sends about as much less on another kind of NIC of that node. A warning where it is not this run's.

    `counted`: node -> kind -> bytes sent per step (a mean over the steps since the last check); `names`: node -> kind
    -> interface, for messages; `own`: node -> kind -> bytes of the ranks' own TCP connections from its address, on the
    wire, 0 where the kernel does not tell (RDMA). A NIC that sends less than planned, with no other that sends more, is
    a warning. NICs of kind ``other`` (storage, management) have users of their own: they count only where another kind
    lacks as much.
    """
    loads, names, own = list(loads), names or {}, own or {}
    planned = expected(loads, header_factor)
    found: list[Finding] = []
    for node, kinds in counted.items():
        plan = planned.get(node, {})
        surplus = {
            k: sent - plan.get(k, 0.0)
            for k, sent in kinds.items()
            if sent - plan.get(k, 0.0) > tolerance * plan.get(k, 0.0) + floor_bytes
        }
        lacking = {
            k: want - kinds.get(k, 0.0)
            for k, want in plan.items()
            if want - kinds.get(k, 0.0) > tolerance * want + floor_bytes
        }
        if surplus.get("other", 0.0) < 0.5 * min(lacking.values(), default=math.inf):
            surplus.pop("other", None)
        for kind, extra in surplus.items():
            nic = names.get(node, {}).get(kind, kind)
            ours = _ours(kind, kinds, own.get(node, {}))
            anothers = ours > 0 and kinds[kind] - ours > extra / 2  # as the kernel tells
            group = None if anothers else _culprit(node, extra, lacking, loads, header_factor)
            what = (
                f"{kind} NIC {nic} sent {kinds[kind] / 1e6:.1f} MB per step, the plan expects "
                f"{plan.get(kind, 0.0) / 1e6:.1f} MB"
            )
            if group is not None:
                what += f": probably group {group.label}, which belongs on {group.kind}"
            if group is None:  # all that this run sends is where it belongs
                said = f"this run's own connections sent {ours / 1e6:.1f} MB of it" if ours else ""
                why = (
                    "the rest is another job's, or a service's"
                    if anothers
                    else "none of this run's groups sends less than planned"
                    + ("" if ours else ": probably another job's, or a service's")
                )
                what += "".join(f", {words}" for words in (said, why) if words)
                hint = (
                    f"see who else sends on {node} (squeue -w {node}, ss -tnp); a NIC of its own, or "
                    "slurm.exclusive=true, keeps others away"
                )
                found.append(Finding("warning", f"node {node}", what, hint, node, nic))
                continue
            hint = (
                f"see that the {group.kind} NIC of {node} is up and has its address (holmes "
                "probe), that routes lead over it (ip route), and that no NCCL_ or GLOO_ variable overrides it"
            )
            found.append(Finding("error", f"node {node}", what, hint, node, nic))
        if not surplus:
            for kind, missing in lacking.items():
                nic = names.get(node, {}).get(kind, kind)
                what = f"{kind} NIC {nic} sent {missing / 1e6:.1f} MB per step less than the plan expects"
                hint = "see `holmes report`; the counters of this NIC may not count all its traffic"
                found.append(Finding("warning", f"node {node}", what, hint, node, nic))
    return found


def _ours(kind: str, counted: Mapping[str, float], own: Mapping[str, float]) -> float:
    """What this run's own connections may have sent over a kind of NIC: those from its address, and what the other
    kinds' NICs did not carry of theirs, for a route may lead elsewhere than an address says."""
    strayed = sum(max(0.0, sent - counted.get(other, 0.0)) for other, sent in own.items() if other != kind)
    return own.get(kind, 0.0) + strayed


def _culprit(
    node: str, extra: float, lacking: Mapping[str, float], loads: Iterable[Load], header_factor: float
) -> Load | None:
    """The group of this node whose bytes, missing on their own kind of NIC, are nearest to the surplus."""
    sums: dict[tuple[str, str], float] = {}
    for load in loads:
        if load.node == node and load.kind in lacking:
            sums[(load.kind, load.label)] = sums.get((load.kind, load.label), 0.0) + load.bytes * header_factor
    if not sums:
        return None
    (kind, label), size = min(sums.items(), key=lambda item: abs(item[1] - extra))
    return Load(node, kind, label, size)


def nic_faults(interfaces: Iterable[str], node: str = "", sysfs: Path = Path("/sys")) -> list[Finding]:
    """Errors for NICs in use that went down or vanished since the start; two small reads a NIC, for use in mid-run.

    `interfaces`: kernel names, or ``device:port`` of RDMA ports.
    """
    found = []
    for name in interfaces:
        device, _, port = name.partition(":")
        path = sysfs / (f"class/infiniband/{device}/ports/{port}/state" if port else f"class/net/{name}/operstate")
        try:
            state = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            state = "gone"
        if state not in ("up", "unknown", "dormant") and not state.endswith(": ACTIVE"):
            hint = "see its cable and switch port" if state == "lowerlayerdown" else "bring it up again"
            found.append(
                Finding(
                    "error",
                    f"node {node}" if node else "this node",
                    f"NIC {name} went down ({state})",
                    f"{hint}, then `holmes resume`",
                    node,
                    name,
                )
            )
    return found
