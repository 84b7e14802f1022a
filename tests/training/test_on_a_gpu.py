"""The order of calls on a GPU rank before its first step. CUDA and the called functions are mocks, so no GPU is needed;
the functions have their own tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import spawn
import torch
from megatron.core.models.gpt import gpt_layer_specs

from holmes_hpc.config.composition import load
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.training import build_model, loop, session
from holmes_hpc.training.model import gpt
from holmes_hpc.training.model.attention import SdpaAttention
from holmes_hpc.training.rank import cuda_check
from holmes_hpc.training.rank.cuda_check import CudaFacts

GPU = torch.device("cuda", 0)
FACTS = CudaFacts("13.0", 13000, 1)


@pytest.fixture
def calls() -> list[str]:
    """Return the list that gets the names of functions replaced by :func:`replace`, as they are called."""
    return []


def replace(calls: list[str], monkeypatch: pytest.MonkeyPatch, module: Any, **results: Any) -> None:
    """Replace each function by one that records its name and returns the given result."""

    def fake(name: str, value: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            calls.append(name)
            return value

        return call

    for name, value in results.items():
        monkeypatch.setattr(module, name, fake(name, value))


def start(calls: list[str], monkeypatch: pytest.MonkeyPatch, train: TrainConfig, facts: CudaFacts = FACTS) -> None:
    groups = MagicMock()
    groups.start.side_effect = lambda *_: calls.append("groups")
    nodes = [SimpleNamespace(node="n0", one_host=True)]
    replace(calls, monkeypatch, session, _lock_run=None, probe=None, Traffic=None, _meet=MagicMock())
    replace(calls, monkeypatch, session.rank_facts, exchange_transports=nodes, check_gpus=None)
    replace(calls, monkeypatch, session, log_line=None, _report_to_ranks=None, check_launch=None)
    replace(calls, monkeypatch, session.cuda_check, use_cuda=True, set_queue_count=None, collect_facts=facts)
    replace(calls, monkeypatch, session.process_groups, Groups=groups, device=GPU)
    replace(calls, monkeypatch, session.affinity, bind="0-3")
    replace(calls, monkeypatch, torch.cuda, get_device_capability=(9, 0), get_device_properties=None)
    replace(calls, monkeypatch, session.dist, PrefixStore=None)
    interfaces = MagicMock(refuse_overrides=lambda _: [], check_links=lambda *_: [], log_lines=lambda _: [])
    monkeypatch.setattr(session, "interfaces", interfaces)
    launch: Any = SimpleNamespace(rank=0, local_rank=0, world_size=1, node="n0", one_host=True, launcher="test")
    config: Any = SimpleNamespace(train=train, slurm=SlurmSettings())
    session.open_session(config, launch, spawn.plan(), MagicMock(), MagicMock(attempt=1), lambda _: None)


def test_a_ranks_gpu_is_checked_before_it_meets_the_others(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start(calls, monkeypatch, TrainConfig(device="cuda"))
    expected = ["set_queue_count", "collect_facts", "_meet", "check_gpus", "bind", "groups"]
    assert [name for name in calls if name in expected] == expected


def test_unsupported_fp8_ends_the_run_before_the_ranks_meet(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs Transformer Engine"):
        start(calls, monkeypatch, TrainConfig(device="cuda", fp8="delayed"))
    monkeypatch.setitem(cuda_check.FP8, "delayed", (*cuda_check.FP8["delayed"][:3], 64))
    with pytest.raises(ConfigError, match="tokens of a micro-batch is 16, delayed needs a multiple of 64"):
        facts = CudaFacts("13.0", 13000, 1, te_version="2.11.0")
        start(calls, monkeypatch, TrainConfig(device="cuda", fp8="delayed"), facts)
    assert "_meet" not in calls and calls[-1] == "_report_to_ranks"


def test_attention_is_checked_first_and_weights_are_compared_last(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Breakdown", "parallel_state", "ProcessGroupCollection", "eager_1f1b", "nic_bytes"):
        monkeypatch.setattr(loop, name, MagicMock())
    for name in ("parallel_state", "optimizer", "eager_1f1b"):
        monkeypatch.setattr(build_model, name, MagicMock())
    replace(calls, monkeypatch, loop, model_parallel_cuda_manual_seed=None, build_datasets=(None, None), document_end=3)
    replace(calls, monkeypatch, loop, Checkpoints=MagicMock(load=lambda _: 0), ControlAllReduce=MagicMock())
    replace(calls, monkeypatch, loop.metrics_line, Loggers=None)
    replace(calls, monkeypatch, loop.gpt, transformer_config=None, build=[MagicMock()])
    replace(calls, monkeypatch, build_model.attention, refuse_unsupported=None)
    replace(calls, monkeypatch, loop.warm_up, connect=None, local_passes=None)
    replace(calls, monkeypatch, loop.replica_check, check=None)
    arguments: list[Any] = []
    monkeypatch.setattr(
        build_model.attention,
        "refuse_unfused",
        lambda *values: (calls.append("refuse_unfused"), arguments.extend(values)),
    )
    loop.parallel_state.get_pipeline_model_parallel_rank.return_value = 0  # type: ignore[attr-defined]
    rank_session = MagicMock(plan=spawn.plan(), cuda=True, device=GPU, nodes=[SimpleNamespace(node="n0")])
    rank_session.launch.rank = 0
    loop.Trainer(load(["run_dir=nowhere"]), rank_session, MagicMock())
    expected = ["refuse_unfused", "build", "Checkpoints", "connect", "local_passes", "check"]
    assert [name for name in calls if name in expected] == expected
    assert arguments[1:] == [0, GPU, torch.bfloat16, True]  # with the mask that separates documents


@pytest.mark.parametrize(("cuda", "dropout", "fused"), [(True, 0.1, True), (False, 0.0, True), (False, 0.1, False)])
def test_layers_use_torchs_fused_attention_unless_a_cpu_drops_scores(
    cuda: bool, dropout: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt_layer_specs, "get_num_layers_to_build", lambda *_, **__: 1)
    monkeypatch.setattr(gpt_layer_specs, "get_transformer_layer_offset", lambda *_, **__: 0)
    monkeypatch.setattr(gpt, "has_transformer_engine", lambda: False)
    plan = spawn.plan(model=dataclasses.replace(spawn.MODEL, dropout=dropout))
    spec = gpt.block_spec(plan.model, gpt.transformer_config(plan, torch.float32, cuda=False), cuda, None)
    attention = spec.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert (attention is SdpaAttention) == fused


@pytest.mark.parametrize(("te", "apex"), [(True, True), (True, False), (False, True)])
def test_fusions_need_transformer_engine_or_apex(te: bool, apex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "has_transformer_engine", lambda: te)
    monkeypatch.setattr(gpt, "find_spec", lambda name: name if apex else None)
    monkeypatch.setattr(gpt, "TransformerConfig", lambda **options: options)
    plan = spawn.plan()
    options: Any = gpt.transformer_config(plan, torch.bfloat16, cuda=True)
    assert options["cross_entropy_loss_fusion"] == te and options["apply_rope_fusion"] == (te and plan.model.rope)
    assert options["gradient_accumulation_fusion"] == (te and apex)
    cpu_options: Any = gpt.transformer_config(plan, torch.bfloat16, cuda=False)
    assert not any(cpu_options[name] for name in cpu_options if name.endswith("_fusion"))
