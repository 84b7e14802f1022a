"""The assumptions behind a layout's costs: one line for each figure that was not measured."""

import math
from collections.abc import Iterator
from itertools import pairwise

from holmes_hpc.fabric.site import Pool
from holmes_hpc.planning.cost.kernels import kind, kinds
from holmes_hpc.planning.cost.layout import Layout, window_rate
from holmes_hpc.planning.cost.network_figures import UNMEASURED_NICS
from holmes_hpc.planning.cost.uncertainty import interval_notes


def assumptions(layout: Layout) -> tuple[str, ...]:
    """Return notes on all figures that were not measured."""
    calibration, notes = layout.costs.calibration, list[str]()
    for pool in dict.fromkeys(layout.pool(c) for c in layout.components):
        gpu = pool.gpu
        if layout.costs.pace_layer_ms:
            notes.append(f"emulated compute: {layout.costs.pace_layer_ms:g} ms a layer forward, twice that backward")
        elif layout.costs.is_measured(pool):
            notes += _calibration_notes(layout, pool)
        else:
            suffix = "; the calibration has other GPUs" if any(f.parts for f in calibration.fabrics) else ""
            figures = f"published figures ({gpu.peak_tflops:g} TFLOP/s peak, fitted efficiency)"
            notes.append(f"compute times of {gpu.name} from {figures}, not measured{suffix}")
            if not gpu.is_cpu and not kind(gpu).known:
                known_kinds = ", ".join(sorted(k.name for k in kinds()))
                problem = f"no kernel table for {gpu.name}: its shares of the peak are assumed"
                notes.append(f"{problem}; tables exist for {known_kinds}")
        if not gpu.has_bf16 and layout.costs.dtype is None:
            notes.append(f"{gpu.name} has no bf16: train.dtype=auto means fp16 for the whole run, with loss scaling")
        elif not gpu.has_bf16 and layout.costs.dtype == "bf16":
            notes.append(f"{gpu.name} has no bf16: predicted as fp16; train.dtype=auto chooses it")
        if not gpu.has_bf16 and gpu.attention is None:
            notes.append(f"{gpu.name} has no FlashAttention: torch's own fused attention is assumed")
        elif not gpu.is_cpu and gpu.attention is None and layout.costs.software.flash:
            notes.append("fused attention by Transformer Engine or torch is assumed; without it, runs fail at start")
        if str(pool.nic) in UNMEASURED_NICS and pool.rdma_efficiency is None and not layout.costs.is_measured(pool):
            notes.append(f"no figures for {pool.nic} ({pool.name}): RoCE's efficiency assumed")
        if not any(f.links for f in calibration.fabrics):
            notes.append("link latencies and efficiencies from published figures, not measured")
    software, p = layout.costs.software, layout.parallel
    has_replicas = any(stage.copies > p.optimizer_instances for stage in p.stages)
    if software.overlap_gather and not software.overlap and p.distributed_optimizer and has_replicas:
        notes.append("train.overlap_param_gather has no effect with train.overlap_grad_reduce=false")
    notes += _tcp_window_notes(layout)
    return tuple(dict.fromkeys([*notes, *interval_notes(layout), *layout.costs.corrections.notes]))


def _tcp_window_notes(layout: Layout) -> Iterator[str]:
    """Yield a note for each pipeline edge on which TCP windows are assumed to limit transfers, because of a delay."""
    for transport, (a, b) in zip(layout.edges[0], pairwise(layout.replicas[0]), strict=False):
        delay_s = layout.site.delay_s(transport.kind, layout.pool(a), layout.pool(b))
        bytes_per_s = layout.site.rate_gbps(transport.kind, layout.pool(a), layout.pool(b)) * 1e9 / 8
        connections = math.ceil(bytes_per_s / window_rate(a.gpus_per_node, delay_s, layout.costs))
        if connections > layout.edge_connections:
            limit = f"TCP windows of 3 MiB limit transfers at a delay of {delay_s * 1e3:g} ms"
            yield f"{a.pool} to {b.pool}: {limit}; plan.edge_connections={connections} uses the link's full rate"


def _calibration_notes(layout: Layout, pool: Pool) -> Iterator[str]:
    """Yield a note for each way in which the measured layer times differ from the pool: its name, GPU kind or TP."""
    measured = layout.costs.calibration.best_match(pool)
    assert measured is not None
    if measured.fabric and measured.fabric != pool.name:
        yield f"layer times on {pool.name} assumed as measured on {measured.fabric}, with the same GPUs"
    gpu_kinds = sorted({f.gpu.name for f in layout.pools.values()})
    if not measured.fabric and not measured.gpu and len(gpu_kinds) > 1:
        problem = f"the calibration names no GPU kind, the site has {' and '.join(gpu_kinds)}"
        yield f"{problem}: calibrate again (profiles and files of earlier releases may lack it)"
    measured_tps = sorted({p.tp for p in measured.parts if p.part == "layer"})
    for tp in (tp for tp in layout.parallel.tps if measured_tps and tp not in measured_tps):
        source = f"TP {', '.join(map(str, measured_tps))}, with collectives added"
        yield f"layers at TP {tp} estimated from {source}; to measure them: `holmes calibrate plan.tp={tp}`"
