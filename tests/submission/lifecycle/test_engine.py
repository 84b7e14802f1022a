"""Which versions of Megatron-Core are taken."""

from __future__ import annotations

import pytest

from holmes_hpc.errors import ConfigError
from holmes_hpc.submission.lifecycle import engine

ASKED = ["einops>=0.8", "megatron-core<0.20,>=0.16.1", "triton>=3.2; python_version >= '3.12'"]


@pytest.mark.parametrize(("found", "taken"), [("0.15.3", False), ("0.16.0", False), ("0.16.1", True), ("0.19.2", True),
                                             ("0.20.0", False)])
def test_a_version_out_of_range_is_said_with_the_range(found: str, taken: bool,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "version", lambda package: found)
    monkeypatch.setattr(engine, "requires", lambda package: ASKED)
    if taken:
        engine.check_engine()
        return
    with pytest.raises(ConfigError) as caught:
        engine.check_engine()
    assert str(caught.value) == (f"megatron-core: {found} is installed, this package takes >=0.16.1,<0.20; "
                                 "pip install 'megatron-core>=0.16.1,<0.20'")
    assert caught.value.exit_code == 2
