"""Supported versions of Megatron-Core, those that Muon needs, and the limit of open files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import plans
import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.submission.lifecycle import create, requirements

REQUIRED = ["einops>=0.8", "megatron-core<0.20,>=0.16.1", "triton>=3.2; python_version >= '3.12'"]


@pytest.fixture(autouse=True)
def forget_checks() -> Iterator[None]:
    requirements.check_megatron_core.cache_clear()
    yield
    requirements.check_megatron_core.cache_clear()


@pytest.mark.parametrize(
    ("installed", "supported"),
    [("0.15.3", False), ("0.16.0", False), ("0.16.1", True), ("0.19.2", True), ("0.20.0", False)],
)
def test_a_version_out_of_range_is_reported_with_the_range(
    installed: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "version", lambda package: installed)
    monkeypatch.setattr(requirements, "requires", lambda package: REQUIRED)
    if supported:
        requirements.check_megatron_core()
        return
    with pytest.raises(ConfigError) as caught:
        requirements.check_megatron_core()
    assert str(caught.value) == (
        f"megatron-core: {installed} is installed, holmes_hpc supports >=0.16.1,<0.20; "
        "pip install 'megatron-core>=0.16.1,<0.20'"
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"megatron-core": "0.16.1"}, "muon needs megatron-core>=0.18, 0.16.1 is installed"),
        ({"megatron-core": "0.19.2"}, "muon needs emerging-optimizers>=0.2, none is installed"),
        ({"megatron-core": "0.19.2", "emerging-optimizers": "0.1.0"}, "muon needs emerging-optimizers>=0.2, 0.1.0 is"),
        ({"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}, None),
        ({}, None),
    ],
)
def test_muon_is_refused_if_it_is_not_installed(
    installed: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise requirements.PackageNotFoundError(package)
        return installed[package]

    for module in ("submission.lifecycle.requirements", "fabric.software"):
        monkeypatch.setattr(f"holmes_hpc.{module}.version", version)
    monkeypatch.setattr(requirements, "requires", lambda package: REQUIRED)
    requirements.check_megatron_core()
    if message is None:
        requirements.check_megatron_core("muon")
        return
    with pytest.raises(ConfigError, match=message) as caught:
        requirements.check_megatron_core("muon")
    assert caught.value.where == "train.optimizer" and caught.value.exit_code == 2


def test_limit_of_open_files_is_raised_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(32, 32)]
    monkeypatch.setattr(requirements.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(requirements.resource, "setrlimit", lambda _, values: limits.append(values))
    with pytest.raises(ConfigError, match=r"a process on \S+ may open 32 files, rank 0 needs 72 or more; set"):
        requirements.allow_open_files(2)
    limits.append((32, 4096))
    requirements.allow_open_files(2)
    assert limits[-1] == (4096, 4096)
    requirements.allow_open_files(16_384, rank=1)
    with pytest.raises(ConfigError, match=r"may open 4096 files, rank 0 needs 65600 or more; set `ulimit -n 65600`"):
        requirements.allow_open_files(16_384, rank=0)


def test_muon_is_refused_where_auto_means_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "check_megatron_core", lambda optimizer: None)
    monkeypatch.setattr(create, "git_commit", lambda: None)
    fields = ["train.optimizer=muon", "plan.distributed_optimizer=false", "model=gpt_tiny", "batch=tiny"]
    plan = plans.plan("ib-a")

    def record(gpu: str, *overrides: str) -> None:
        kind = Gpu(gpu, 100.0, 32.0, 1200.0)
        site = replace(plan.site, pools=tuple(replace(f, gpu=kind) for f in plan.site.pools))
        create.record_fields(load([*fields, *overrides]), replace(plan, site=site))

    with pytest.raises(ConfigError, match=r"train.optimizer: Megatron-Core's Muon lacks fp16, .*; use train.optimizer"):
        record("v100-32gb")
    record("a100-40gb")
    record("v100-32gb", "train.dtype=fp32")
    record("v100-32gb", "train.device=cpu")


def test_a_rank_to_profile_that_does_not_exist_is_refused_before_a_job() -> None:
    config = load(["model=gpt_tiny", "batch=tiny", "train.profile={start: 1, stop: 2, ranks: [0, 4]}"])
    with pytest.raises(ConfigError, match=r"train\.profile\.ranks: rank 4 does not exist; use 0 to 3") as refused:
        requirements.check_training(config.train, plans.plan("ib-a", "roce-a"))
    assert refused.value.exit_code == 2
