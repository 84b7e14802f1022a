"""Which device a rank trains on, and CUDA's hardware queues."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plans import plan, site

from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Gpu, Site
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Schedule
from holmes_hpc.training.rank import cuda_check as cuda


def on_gpus(*cpus: str) -> Site:
    """The testbed's site with GPUs, but for the fabrics `cpus`."""
    gpu = Gpu("h100", 989, 80, 3600)
    return replace(site(), fabrics=tuple(f if f.name in cpus else replace(f, gpu=gpu) for f in site().fabrics))


def test_auto_is_the_cpu_where_a_fabric_is_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for fabrics, cpus, found in (
        (("ib-a",), (), True),
        (("ib-a",), ("ib-a",), False),
        (("ib-a",), ("roce-a",), True),
        (("ib-a", "roce-a"), ("roce-a",), False),
    ):
        given = plan(*fabrics, site=on_gpus(*cpus))
        assert cuda.wanted("auto", given) is found
        assert not cuda.wanted("cpu", given) and cuda.wanted("cuda", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cuda.wanted("auto", plan("ib-a", site=on_gpus()))
    with pytest.raises(ConfigError, match=r"use train.device=cpu"):
        cuda.wanted("cuda", plan("ib-a"))


def test_a_cpu_run_never_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was asked"))
    assert not cuda.wanted("auto", plan("ib-a")) and not cuda.wanted("cpu", plan("ib-a", site=on_gpus()))


def test_every_stream_has_a_hardware_queue() -> None:
    """A middle stage of a pipeline over TCP, with two connections an edge: 1 computes, 8 of edges, 1 of data
    parallelism, 3 of what comes after the passes."""
    three = replace(plan("ib-a", "roce-a", "eth-a", site=on_gpus()), edge_connections=2)
    assert [cuda.streams(three, rank) for rank in range(0, 6, 2)] == [9, 13, 9]
    environ: dict[str, str] = {}
    assert cuda.connect_queues(three, 2, environ) is None and environ == {cuda.CONNECTIONS: "13"}
    assert cuda.connect_queues(plan("ib-a", site=on_gpus()), 0, environ := {}) is None
    assert environ == {cuda.CONNECTIONS: "8"}
    assert cuda.connect_queues(replace(three, edge_connections=16), 2, environ := {}) is None
    assert environ == {cuda.CONNECTIONS: "32"}


def test_the_sites_own_number_stays_and_is_said() -> None:
    environ = {cuda.CONNECTIONS: "1"}
    said = cuda.connect_queues(plan("ib-a", "roce-a", site=on_gpus()), 0, environ)
    assert environ == {cuda.CONNECTIONS: "1"}
    assert said == ("CUDA_DEVICE_MAX_CONNECTIONS is 1 in the environment and stays so; the streams of rank 0 need 8")


def test_the_ring_of_two_stages_has_two_edges() -> None:
    two = plan("ib-a", "roce-a", nodes=1, site=on_gpus())
    ring = replace(
        two,
        parallel=Parallel.uniform(pp=2, virtual_stages=3),
        schedule=Schedule("interleaved", (6, 4)),
        stages=tuple(replace(s, chunks=(1, 1, 1)) for s in two.stages),
    )
    assert cuda.streams(ring, 0) - cuda.streams(two, 0) == 2
