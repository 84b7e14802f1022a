"""What a rank and a node exchange with rank 0's store at the start does not grow with the number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from one_process import last_line

SCRIPT = """
import json
import scale_start

starts = [scale_start.measure(ranks) for ranks in (72, 216)]
growth = {figure: scale_start.growth(starts, figure) for figure in ("requests", "node_bytes", "host_files")}
errors = [error for start in starts for error in start.errors]
print(json.dumps([growth, errors, sum(start.failed_tries for start in starts), starts[-1].node_bytes]))
"""


@pytest.mark.integration
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a network without DNS")
def test_the_start_of_a_rank_stays_as_cheap_with_more_ranks(tmp_path: Path) -> None:
    growth, errors, failed_tries, node_bytes = json.loads(last_line(SCRIPT, tmp_path))
    assert errors == [] and failed_tries == 0 and node_bytes < 200_000
    assert growth["requests"] < 0.3 and growth["node_bytes"] < 0.6 and growth["host_files"] < 1.2
