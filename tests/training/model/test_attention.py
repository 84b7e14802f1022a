"""torch's fused attention: results equal to Megatron-Core's own, and refusals."""

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

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.data import samples
from holmes_hpc.training.model import attention
from holmes_hpc.training.model.attention import SdpaAttention
from holmes_hpc.training.rank import cpu

ALONE = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's scratch memory and masks on the CPU."""
    scratch = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(parallel_state, "get_global_memory_buffer", lambda: scratch)
    cpu.redirect_tensors(monkeypatch.setattr)


def build(kind: type[Any], heads: int, groups: int, **options: Any) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * 16,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **options,
    )
    mask = AttnMaskType.causal
    return kind(config=config, layer_number=1, attn_mask_type=mask, attention_type="self", pg_collection=ALONE)


def test_documents_kept_apart_attend_only_to_themselves() -> None:
    """Packed under a mask, each gives the same output as alone."""
    end, numbers = 9, torch.Generator().manual_seed(1)
    tokens = torch.tensor([[1, 2, end, 3, 4, 5, end, 6], [end, end, 1, 1, 1, 1, 1, 1]])
    positions, mask = samples.separate_documents(tokens, end)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 0, 1, 2, 3, 4, 5]]
    inputs = [torch.randn(8, 2, n, 16, generator=numbers) for n in (4, 2, 2)]
    attention_layer = build(SdpaAttention, 4, 2)
    packed = attention_layer(*inputs, attention_mask=mask)
    for row, bounds in enumerate(([0, 3, 7, 8], [0, 1, 2, 8])):
        for first, last in pairwise(bounds):
            alone = attention_layer(*(t[first:last, row : row + 1] for t in inputs), attention_mask=None)
            torch.testing.assert_close(packed[first:last, row : row + 1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2), (6, 1)])
def test_outputs_and_gradients_equal_megatrons_own(heads: int, groups: int, megatron: None) -> None:
    numbers = torch.Generator().manual_seed(1)
    tensors = []
    inputs = [torch.randn(33, 3, n, 16, generator=numbers) for n in (heads, groups, groups)]
    slope = torch.randn(33, 3, heads * 16, generator=numbers)
    for kind in (DotProductAttention, SdpaAttention):
        copies = [t.clone().requires_grad_() for t in inputs]
        attention_layer = build(kind, heads, groups)
        attention_layer.config.sequence_parallel = True  # so that Megatron-Core's draws no random numbers
        output = attention_layer(*copies, attention_mask=None)
        output.backward(slope)
        tensors.append([output, *(t.grad for t in copies)])
    for megatron_tensor, sdpa_tensor in zip(*tensors, strict=True):
        assert sdpa_tensor.shape == megatron_tensor.shape
        torch.testing.assert_close(sdpa_tensor, megatron_tensor, atol=1e-5, rtol=1e-5)


def test_dropout_is_used_in_training_only_with_the_random_state_of_the_tensor_parallel_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forks: list[str] = []

    @contextlib.contextmanager
    def fork() -> Iterator[None]:
        forks.append("fork")
        yield

    monkeypatch.setattr(attention, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork))
    attention_layer = build(SdpaAttention, 4, 4)
    attention_layer._dropout = 0.5
    inputs = [torch.randn(8, 2, 4, 16) for _ in range(3)]
    first, second = (attention_layer(*inputs, attention_mask=None) for _ in range(2))
    assert not torch.equal(first, second) and forks == ["fork", "fork"]
    attention_layer.eval()
    first, second = (attention_layer(*inputs, attention_mask=None) for _ in range(2))
    assert torch.equal(first, second) and len(forks) == 2


@pytest.mark.parametrize(
    ("setting", "has_kernels", "is_refused"),
    [
        (None, False, True),
        ("flash", False, True),
        ("sdpa", False, True),
        ("unfused", False, False),
        (None, True, False),
    ],
)
def test_a_plan_that_assumes_fused_attention_without_a_kernel_is_refused(
    setting: str | None, has_kernels: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of torch is a mock, because there is no GPU."""
    plan = on_a100(setting)
    for name in ("flash", "efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda parameters: has_kernels)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *parameters: parameters)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    refusal = pytest.raises(PlanError, match="assumes fused attention") if is_refused else contextlib.nullcontext()
    with refusal:
        attention.refuse_unfused(plan, 0, torch.device("cuda", 0), torch.bfloat16, False)


def test_documents_kept_apart_are_checked_with_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel of torch supports no mask; its answer is a mock."""
    empty, ones = torch.empty, torch.ones
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: ones(*size, **options))
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *parameters: parameters)
    for name in ("flash", "efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda parameters: parameters[3] is None)
    plan, gpu = on_a100(), torch.device("cuda", 0)
    attention.refuse_unfused(plan, 0, gpu, torch.bfloat16, False)
    with pytest.raises(PlanError, match="documents kept apart"):
        attention.refuse_unfused(plan, 0, gpu, torch.bfloat16, True)


def test_transformer_engine_has_no_fused_attention_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_transformer_engine", lambda: True)
    attention.refuse_unfused(on_a100(), 0, torch.device("cuda", 0), torch.bfloat16, False)
    with pytest.raises(PlanError, match=r"Transformer Engine does not support it in float32; "):
        attention.refuse_unfused(on_a100(), 0, torch.device("cuda", 0), torch.float32, False)
    plan = on_a100("sdpa")
    v100 = replace(A100, name="v100-32gb", attention="sdpa")
    old = replace(plan, site=replace(plan.site, pools=tuple(replace(f, gpu=v100) for f in plan.site.pools)))
    with pytest.raises(PlanError, match=r"Engine does not support it in float16; use an environment without"):
        attention.refuse_unfused(old, 0, torch.device("cuda", 0), torch.float16, False)


def on_a100(attention: str | None = None) -> Plan:
    """Return a plan whose fabrics have A100s, with `attention` in its site file."""
    plan, gpu = spawn.plan(), replace(A100, attention=attention)
    return replace(plan, site=replace(plan.site, pools=tuple(replace(f, gpu=gpu) for f in plan.site.pools)))
