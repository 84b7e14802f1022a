"""torch's fused attention gives the numbers of Megatron-Core's own, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import spawn
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from sites import A100

from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.data import samples
from holmes_hpc.training.model import attention
from holmes_hpc.training.model.attention import SdpaAttention
from holmes_hpc.training.rank import cpu

ALONE = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its scratch memory and masks, on the CPU."""
    scratch = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(parallel_state, "get_global_memory_buffer", lambda: scratch)
    with cpu._CudaMeansCpu():
        yield


def made(kind: type[Any], heads: int, groups: int, **more: Any) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * 16,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **more,
    )
    return kind(config, 1, AttnMaskType.causal, "self", pg_collection=ALONE)


def test_documents_that_are_kept_apart_attend_to_themselves() -> None:
    """Packed behind each other under a mask, each gives what it gives alone."""
    end, numbers = 9, torch.Generator().manual_seed(1)
    tokens = torch.tensor([[1, 2, end, 3, 4, 5, end, 6], [end, end, 1, 1, 1, 1, 1, 1]])
    positions, mask = samples.separate_documents(tokens, end)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 0, 1, 2, 3, 4, 5]]
    inputs = [torch.randn(8, 2, n, 16, generator=numbers) for n in (4, 2, 2)]
    attends = made(SdpaAttention, 4, 2)
    packed = attends(*inputs, attention_mask=mask)
    for row, bounds in enumerate(([0, 3, 7, 8], [0, 1, 2, 8])):
        for first, last in pairwise(bounds):
            alone = attends(*(t[first:last, row : row + 1] for t in inputs), attention_mask=None)
            torch.testing.assert_close(packed[first:last, row : row + 1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (6, 1)])
def test_the_numbers_of_megatrons_own(heads: int, groups: int, megatron: None) -> None:
    numbers = torch.Generator().manual_seed(1)
    found = []
    inputs = [torch.randn(33, 3, n, 16, generator=numbers) for n in (heads, groups, groups)]
    slope = torch.randn(33, 3, heads * 16, generator=numbers)
    for kind in (DotProductAttention, SdpaAttention):
        own = [t.clone().requires_grad_() for t in inputs]
        attends = made(kind, heads, groups)
        attends.config.sequence_parallel = True  # so that Megatron-Core's asks for no random numbers
        output = attends(*own, attention_mask=None)
        output.backward(slope)
        found.append([output, *(t.grad for t in own)])
    for theirs, ours in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_dropout_is_in_training_only_with_random_numbers_of_the_tensor_parallel_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forks: list[str] = []

    @contextlib.contextmanager
    def fork() -> Iterator[None]:
        forks.append("fork")
        yield

    monkeypatch.setattr(attention, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork))
    own = made(SdpaAttention, 4, 4)
    own._dropout = 0.5
    inputs = [torch.randn(8, 2, 4, 16) for _ in range(3)]
    first, second = (own(*inputs, attention_mask=None) for _ in range(2))
    assert not torch.equal(first, second) and forks == ["fork", "fork"]
    own.eval()
    first, second = (own(*inputs, attention_mask=None) for _ in range(2))
    assert torch.equal(first, second) and len(forks) == 2


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_size"):
        made(SdpaAttention, 4, 4, window_size=(8, 0))
    with pytest.raises(ConfigError, match="bias"):
        made(SdpaAttention, 4, 4)(*(torch.zeros(4, 1, 4, 16),) * 3, attention_mask=None, attention_bias=torch.ones(4))


@pytest.mark.parametrize(
    ("said", "kernels", "ends"),
    [
        (None, False, True),
        ("flash", False, True),
        ("sdpa", False, True),
        ("unfused", False, False),
        (None, True, False),
    ],
)
def test_a_plan_that_counts_on_fused_attention_where_there_is_none_is_refused(
    said: str | None, kernels: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's answer is made up: there is no GPU here to ask."""
    plan = on_a100(said)
    for name in ("flash", "efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda asked: kernels)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *asked: asked)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **how: empty(*size, **how))
    expected = pytest.raises(PlanError, match="counts on fused attention") if ends else contextlib.nullcontext()
    with expected:
        attention.refuse_unfused(plan, 0, torch.device("cuda", 0), torch.bfloat16, False)


def test_documents_apart_are_asked_for_with_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash kernel takes none; its answer is made up."""
    empty, ones = torch.empty, torch.ones
    monkeypatch.setattr(torch, "empty", lambda *size, device, **how: empty(*size, **how))
    monkeypatch.setattr(torch, "ones", lambda *size, device, **how: ones(*size, **how))
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *asked: asked)
    for name in ("flash", "efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda asked: asked[3] is None)
    plan, gpu = on_a100(), torch.device("cuda", 0)
    attention.refuse_unfused(plan, 0, gpu, torch.bfloat16, False)
    with pytest.raises(PlanError, match="documents kept apart"):
        attention.refuse_unfused(plan, 0, gpu, torch.bfloat16, True)


def test_transformer_engine_has_none_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_transformer_engine", lambda: True)
    attention.refuse_unfused(on_a100(), 0, torch.device("cuda", 0), torch.bfloat16, False)
    with pytest.raises(PlanError, match=r"Transformer Engine has none here .* in float32"):
        attention.refuse_unfused(on_a100(), 0, torch.device("cuda", 0), torch.float32, False)


def on_a100(attention: str | None = None) -> Plan:
    """A plan whose fabrics are of A100s, with `attention` in its site file."""
    made, gpu = spawn.plan(), replace(A100, attention=attention)
    return replace(made, site=replace(made.site, fabrics=tuple(replace(f, gpu=gpu) for f in made.site.fabrics)))
