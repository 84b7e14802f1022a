"""The session's testbed, which every test marked `slurm` uses."""

from pathlib import Path

import pytest


@pytest.mark.slurm
def test_testbed_of_the_session_is_up_in_the_tests_environment(testbed: object) -> None:
    env, nodes = testbed.env, testbed.nodes  # type: ignore[attr-defined]
    assert Path(env["SLURM_CONF"]).is_file() and "ib1" in nodes
    assert testbed.exec("ib1", "hostname").stdout == "ib1\n"  # type: ignore[attr-defined]
    assert "ib1" in testbed.run("sinfo", "-h", "-N", "-o", "%N").stdout.split()  # type: ignore[attr-defined]
