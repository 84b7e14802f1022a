"""The device that a rank trains on, and CUDA's hardware queues."""

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
    """Return the testbed's site with GPUs in all fabrics except those named `cpus`."""
    gpu = Gpu("h100", 989, 80, 3600)
    return replace(site(), pools=tuple(f if f.name in cpus else replace(f, gpu=gpu) for f in site().pools))


def test_auto_means_the_cpu_if_a_fabric_of_the_plan_has_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for fabrics, cpus, expected in (
        (("ib-a",), (), True),
        (("ib-a",), ("ib-a",), False),
        (("ib-a",), ("roce-a",), True),
        (("ib-a", "roce-a"), ("roce-a",), False),
    ):
        mixed_plan = plan(*fabrics, site=on_gpus(*cpus))
        assert cuda.use_cuda("auto", mixed_plan) is expected
        assert not cuda.use_cuda("cpu", mixed_plan) and cuda.use_cuda("cuda", mixed_plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cuda.use_cuda("auto", plan("ib-a", site=on_gpus()))
    with pytest.raises(ConfigError, match=r"use train.device=cpu"):
        cuda.use_cuda("cuda", plan("ib-a"))


def test_a_cpu_run_never_queries_torch_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was queried"))
    assert not cuda.use_cuda("auto", plan("ib-a")) and not cuda.use_cuda("cpu", plan("ib-a", site=on_gpus()))


def test_every_stream_has_a_hardware_queue() -> None:
    """A middle stage over TCP with two connections per edge has 1 for compute, 8 for edges, 1 for data parallelism
    and 3 after the passes."""
    three = replace(plan("ib-a", "roce-a", "eth-a", site=on_gpus()), edge_connections=2)
    assert [cuda.stream_count(three, rank) for rank in range(0, 6, 2)] == [9, 13, 9]
    environ: dict[str, str] = {}
    assert cuda.set_queue_count(three, 2, environ) is None and environ == {cuda.CONNECTIONS: "13"}
    assert cuda.set_queue_count(plan("ib-a", site=on_gpus()), 0, environ := {}) is None
    assert environ == {cuda.CONNECTIONS: "8"}
    assert cuda.set_queue_count(replace(three, edge_connections=16), 2, environ := {}) is None
    assert environ == {cuda.CONNECTIONS: "32"}


def test_a_queue_count_in_the_environment_is_kept_with_a_warning() -> None:
    environ = {cuda.CONNECTIONS: "1"}
    warning = cuda.set_queue_count(plan("ib-a", "roce-a", site=on_gpus()), 0, environ)
    assert environ == {cuda.CONNECTIONS: "1"}
    assert warning == "CUDA_DEVICE_MAX_CONNECTIONS=1 from the environment is kept; the streams of rank 0 need 8"


def test_two_interleaved_stages_have_a_second_edge() -> None:
    two = plan("ib-a", "roce-a", nodes=1, site=on_gpus())
    ring = replace(
        two,
        parallel=Parallel.uniform(pp=2, virtual_stages=3),
        schedule=Schedule("interleaved", (6, 4)),
        stages=tuple(replace(s, chunks=(1, 1, 1)) for s in two.stages),
    )
    assert cuda.stream_count(ring, 0) - cuda.stream_count(two, 0) == 2
