"""Seconds of kernels against hand calculations, and the tables of GPU kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import A100, one_fabric

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.kernels import STACK, Device, Kind, kind, kinds
from holmes_hpc.planning.cost.software import Software

DEVICE, ON = Device(A100, 2), one_fabric(A100)
PEAK = 312e12 * kind(A100).product * STACK.product
MODEL, BATCH = named("llama2_7b"), Batch(64, 1, 2048)


def test_a_partial_wave_takes_as_long_as_a_full_one() -> None:
    """On 108 multiprocessors, 108 tiles of 256 x 128 are one wave. One more row of tiles needs a second wave."""
    k = 8192
    one, two = DEVICE.product_s(256 * 9, 128 * 12, k), DEVICE.product_s(256 * 9, 128 * 13, k)
    assert one == pytest.approx(2 * 256 * 9 * 128 * 12 * (k + 64) / PEAK)
    assert 1.2 * one < two <= 2 * one


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_products_never_exceed_the_peak(m: int, n: int, k: int) -> None:
    m, n, k = 64 * m, 64 * n, 64 * k
    assert DEVICE.product_s(m, n, k) >= 2 * m * n * k / PEAK


def test_narrow_and_unaligned_products_are_slower() -> None:
    """An eighth of a product takes more than an eighth of its time.
    Sides that are not a multiple of 128 bytes take longer."""
    full_s = DEVICE.product_s(2048, 4096, 4096)
    assert 8 * DEVICE.product_s(2048, 512, 4096) > 1.1 * full_s
    assert DEVICE.product_s(2048, 4096, 4096 - 8) > 1.1 * full_s
    assert DEVICE.product_s(2048, 4096, 4096 - 1) > 2.5 * full_s


def test_fused_attention_computes_half_of_the_scores() -> None:
    forward, backward = DEVICE.flash_s(32, 65536, 128, "flash")
    assert forward == pytest.approx(2 * 32 * 65536**2 * 128 / (312e12 * kind(A100).flash * STACK.flash), rel=0.02)
    assert backward > 2.5 * forward
    assert DEVICE.flash_s(32, 65536, 128, "flash1")[0] > 1.5 * forward


def test_the_longest_matching_kind_name_wins() -> None:
    assert kind(replace(A100, name="a100-40gb")).memory_gbps == 1555 and kind(A100).memory_gbps == 2039
    for name, memory_gbps in (("NVIDIA A100-SXM4-80GB", 2039), ("a100-sxm4-40gb", 1555), ("a100-80g", 2039)):
        assert kind(replace(A100, name=name)).memory_gbps == memory_gbps  # the vocabulary reads the kind from the name
    assert kind(Gpu("gh200", 989, 96, 3600)).name == "gh200" != kind(Gpu("h200", 989, 141, 3600)).name
    assert all(k.source for k in kinds()) and len({k.name for k in kinds()}) == len(kinds())


def test_a_kind_without_a_table_gets_assumed_figures() -> None:
    table = kind(Gpu("tpu-v9", 1000, 100, 1000))
    assert not table.known and table.sms > 0
    with pytest.raises(ConfigError, match=r"product is 1\.2"):
        Kind("x", 108, 1555, 156, 1.2, 0.5)


def layer(costs: Costs = Costs(), batch: Batch = BATCH, tp: int = 1, **more: object) -> tuple[float, float]:
    return costs.layer_s(MODEL, batch, tp, ON, **more)  # type: ignore[arg-type]


def test_tiny_passes_take_as_long_as_their_launches() -> None:
    model, tiny = named("gpt_tiny"), Batch(64, 1, 64)
    forward, backward = Costs().layer_s(model, tiny, 1, ON)
    assert backward == pytest.approx(2 * forward)
    assert Costs().layer_s(model, tiny, 1, ON, recompute="full")[1] == pytest.approx(3 * forward)
    assert Costs().layer_s(model, replace(tiny, micro_size=2), 1, ON)[0] == forward


def test_blocking_launches_add_to_the_kernels() -> None:
    """CUDA_LAUNCH_BLOCKING=1 costs more with TP, whose ranks do less work per launch."""
    waits = Costs(software=Software(awaited_launches=True))
    slowdowns = [sum(layer(waits, tp=tp)) / sum(layer(tp=tp)) for tp in (1, 8)]
    assert 1 < slowdowns[0] < slowdowns[1]


def test_tensor_parallel_is_never_free() -> None:
    """Each of 8 ranks does more than an eighth of a layer's work and communicates."""
    one, eight = layer(batch=Batch(64, 8, 2048)), layer(batch=Batch(64, 8, 2048), tp=8)
    assert eight[0] > 1.2 * one[0] / 8 and eight[1] > 1.2 * one[1] / 8
    separate = layer(Costs(software=Software(backward_reductions=5)), Batch(64, 8, 2048), 8)
    assert separate[0] == eight[0] and separate[1] > eight[1]


def test_unfused_operations_take_longer() -> None:
    fused = layer()
    for software in (
        Software(attention="flash1"),
        Software(attention="softmax"),
        Software(attention="unfused"),
        Software(fused_norm=False),
        Software(fused_elementwise=False),
    ):
        assert sum(layer(Costs(software=software))) > 1.02 * sum(fused)
    gathered = Costs(software=Software(gathered_logits=True))
    assert sum(gathered.part_s("head", MODEL, BATCH, 8, ON)) > 1.5 * sum(Costs().part_s("head", MODEL, BATCH, 8, ON))


def test_megatrons_fused_softmax_falls_back_for_odd_shapes() -> None:
    software = Software(attention="softmax")
    assert software.attention_of(2, 1024, 1) == "unfused" and software.attention_of(4, 1024, 1) == "softmax"
    assert software.attention_of(4, 8192, 1) == "unfused"


def test_twice_the_micro_batch_takes_less_than_twice_the_time() -> None:
    one, two = sum(layer()), sum(layer(batch=replace(BATCH, micro_size=2)))
    assert one < two < 2 * one


def test_fp32_products_have_their_own_peak() -> None:
    assert Device(A100, 4).product_s(4096, 4096, 4096) == pytest.approx(2 * DEVICE.product_s(4096, 4096, 4096))


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention is 'fast'"):
        Software(attention="fast")
    with pytest.raises(ConfigError, match="sharding=full requires overlap"):
        Software(sharding="full", overlap=False)
