"""Which versions of Megatron-Core are taken, and with which Muon is."""

from __future__ import annotations

import pytest

from holmes_hpc.errors import ConfigError
from holmes_hpc.submission.lifecycle import requirements

ASKED = ["einops>=0.8", "megatron-core<0.20,>=0.16.1", "triton>=3.2; python_version >= '3.12'"]


@pytest.mark.parametrize(
    ("found", "taken"), [("0.15.3", False), ("0.16.0", False), ("0.16.1", True), ("0.19.2", True), ("0.20.0", False)]
)
def test_a_version_out_of_range_is_said_with_the_range(
    found: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "version", lambda package: found)
    monkeypatch.setattr(requirements, "requires", lambda package: ASKED)
    if taken:
        requirements.check_engine()
        return
    with pytest.raises(ConfigError) as caught:
        requirements.check_engine()
    assert str(caught.value) == (
        f"megatron-core: {found} is installed, this package takes >=0.16.1,<0.20; "
        "pip install 'megatron-core>=0.16.1,<0.20'"
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"megatron-core": "0.16.1"}, "muon needs megatron-core>=0.18, 0.16.1 is installed"),
        ({"megatron-core": "0.19.2"}, "muon needs emerging-optimizers>=0.2, none is installed"),
        ({"megatron-core": "0.19.2", "emerging-optimizers": "0.1.0"}, "muon needs emerging-optimizers>=0.2, 0.1.0 is"),
        ({"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}, None),
        ({}, None),
    ],
)
def test_muon_is_refused_where_it_is_absent(
    installed: dict[str, str], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise requirements.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(requirements, "version", version)
    monkeypatch.setattr(requirements, "requires", lambda package: ASKED)
    requirements.check_engine()
    if says is None:
        requirements.check_engine("muon")
        return
    with pytest.raises(ConfigError, match=says) as caught:
        requirements.check_engine("muon")
    assert caught.value.where == "train.optimizer" and caught.value.exit_code == 2
