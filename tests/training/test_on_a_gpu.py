"""What a rank on a GPU does, and in which order, before its first step. No GPU has been near this: CUDA and all that is
around the calls are replaced; what they do has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import spawn
import torch

from holmes_hpc.config.composition import load
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.training import loop, session
from holmes_hpc.training.model import gpt
from holmes_hpc.training.model.attention import SdpaAttention
from holmes_hpc.training.rank import cuda_check
from holmes_hpc.training.rank.cuda_check import CudaFacts

GPU = torch.device("cuda", 0)
FACTS = CudaFacts("13.0", 13000, 1)


@pytest.fixture
def calls() -> list[str]:
    """What was called, in order, of what :func:`noted` put in a function's place."""
    return []


def noted(calls: list[str], monkeypatch: pytest.MonkeyPatch, where: Any, **gives: Any) -> None:
    """Put in the place of each function one that notes its name and gives a value."""

    def instead(name: str, value: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            calls.append(name)
            return value

        return call

    for name, value in gives.items():
        monkeypatch.setattr(where, name, instead(name, value))


def start(calls: list[str], monkeypatch: pytest.MonkeyPatch, train: TrainConfig, facts: CudaFacts = FACTS) -> None:
    made = MagicMock()
    made.start.side_effect = lambda *_: calls.append("groups")
    nodes = [SimpleNamespace(node="n0", one_host=True)]
    noted(calls, monkeypatch, session, _own=None, probe=None, Traffic=None, _meet=MagicMock(), _exchange=nodes)
    noted(calls, monkeypatch, session, _check_memory=None, say=None, _tell_the_others=None)
    noted(calls, monkeypatch, session.launch, check=None)
    noted(calls, monkeypatch, session.cuda_check, wanted=True, connect_queues=None, gather=facts)
    noted(calls, monkeypatch, session.process_groups, Groups=made, device=GPU, check_devices=None)
    noted(calls, monkeypatch, session.affinity, bind="0-3")
    noted(calls, monkeypatch, torch.cuda, get_device_capability=(9, 0), get_device_properties=None)
    noted(calls, monkeypatch, session.dist, PrefixStore=None)
    interfaces = MagicMock(refuse_overrides=lambda _: [], check_links=lambda *_: [], log_lines=lambda _: [])
    monkeypatch.setattr(session, "interfaces", interfaces)
    own = SimpleNamespace(rank=0, local_rank=0, world_size=1, node="n0", one_host=True, by="test")
    session.start(train, own, spawn.plan(), MagicMock(), MagicMock(attempt=1), True, lambda _: None)  # type: ignore[arg-type]


def test_a_ranks_gpu_is_looked_at_before_it_meets_the_others(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start(calls, monkeypatch, TrainConfig(device="cuda"))
    wanted = ["connect_queues", "gather", "_meet", "check_devices", "_check_memory", "bind", "groups"]
    assert [name for name in calls if name in wanted] == wanted


def test_fp8_that_cannot_be_had_ends_the_run_before_the_ranks_meet(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs Transformer Engine"):
        start(calls, monkeypatch, TrainConfig(device="cuda", fp8="delayed"))
    monkeypatch.setitem(cuda_check.FP8, "delayed", (*cuda_check.FP8["delayed"][:3], 64))
    with pytest.raises(ConfigError, match="tokens of a micro-batch: 16, where fp8 needs a multiple of 64"):
        start(calls, monkeypatch, TrainConfig(device="cuda", fp8="delayed"), CudaFacts("13.0", 13000, 1, te="2.11.0"))
    assert "_meet" not in calls and calls[-1] == "_tell_the_others"


def test_attention_is_asked_for_first_and_weights_are_compared_last(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Breakdown", "parallel_state", "optimizer", "ProcessGroupCollection", "run_ahead", "nic_bytes"):
        monkeypatch.setattr(loop, name, MagicMock())
    noted(calls, monkeypatch, loop, model_parallel_cuda_manual_seed=None, build_datasets=(None, None), document_end=3)
    noted(calls, monkeypatch, loop, Checkpoints=MagicMock(load=lambda _: 0), ControlAllReduce=None)
    noted(calls, monkeypatch, loop.metrics_line, Loggers=None)
    noted(calls, monkeypatch, loop.gpt, transformer_config=None, build=[MagicMock()])
    noted(calls, monkeypatch, loop.attention, refuse_apart=None)
    noted(calls, monkeypatch, loop.warm_up, connect=None, local_passes=None)
    noted(calls, monkeypatch, loop.replicas, check=None)
    asked: list[Any] = []
    monkeypatch.setattr(
        loop.attention, "refuse_unfused", lambda *said: (calls.append("refuse_unfused"), asked.extend(said))
    )
    loop.parallel_state.get_pipeline_model_parallel_rank.return_value = 0  # type: ignore[attr-defined]
    here = MagicMock(plan=spawn.plan(), cuda=True, device=GPU, nodes=[SimpleNamespace(node="n0")])
    here.launch.rank = 0
    loop.Trainer(load(["run_dir=nowhere"]), here, MagicMock())
    wanted = ["refuse_unfused", "build", "Checkpoints", "connect", "local_passes", "check"]
    assert [name for name in calls if name in wanted] == wanted
    assert asked[1:] == [0, GPU, torch.bfloat16, True]  # with the mask that keeps documents apart


@pytest.mark.parametrize(("cuda", "dropout", "fused"), [(True, 0.1, True), (False, 0.0, True), (False, 0.1, False)])
def test_layers_have_torchs_fused_attention(
    cuda: bool, dropout: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "get_num_layers_to_build", lambda *_, **__: 1)
    monkeypatch.setattr(gpt, "has_transformer_engine", lambda: False)
    model = spawn.plan().model
    spec = gpt.block_spec(SimpleNamespace(**{**vars(model), "dropout": dropout}), None, cuda, None)  # type: ignore[arg-type]
    attention = spec.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert (attention is SdpaAttention) == fused


@pytest.mark.parametrize(("te", "apex"), [(True, True), (True, False), (False, True)])
def test_what_transformer_engine_fuses_is_on_where_it_is(te: bool, apex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "has_transformer_engine", lambda: te)
    monkeypatch.setattr(gpt, "find_spec", lambda name: name if apex else None)
    monkeypatch.setattr(gpt, "TransformerConfig", lambda **said: said)
    plan = spawn.plan()
    said: Any = gpt.transformer_config(plan, torch.bfloat16, cuda=True)
    assert said["cross_entropy_loss_fusion"] == te and said["apply_rope_fusion"] == (te and plan.model.rope)
    assert said["gradient_accumulation_fusion"] == (te and apex)
    off: Any = gpt.transformer_config(plan, torch.bfloat16, cuda=False)
    assert not any(off[name] for name in off if name.endswith("_fusion"))
