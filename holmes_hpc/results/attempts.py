"""The table of a run's attempts: what each one loaded, and what the change from the one before cost."""

import math
from collections import defaultdict
from typing import Any

from holmes_hpc.console import NONE
from holmes_hpc.records.rates import number
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results.columns import has_value
from holmes_hpc.results.tables import Table, as_text, format_number

COLUMNS = ["attempt", "nodes", "loaded", "first step", "steps again", "s without a step", "ended"]


def attempts_tables(run: RunDirectory) -> list[Table]:
    """Return the table of the attempts of a run with several; none for other runs. `steps again`: steps that earlier
    attempts had made; `s without a step`: from the last step before the attempt to the end of its first step."""
    attempts = [attempt if isinstance(attempt, dict) else {} for attempt in run.read_run()["attempts"]]
    if len(attempts) < 2:
        return []
    times_of = defaultdict[int, dict[int, float]](dict)  # {attempt: {step: Unix time of its end}}
    for step, of_attempt, line in run.metrics_lines():
        if "time" in line:
            times_of[of_attempt][step] = number(line["time"])
    rows, last_step, last_time = list[list[str]](), -1, math.nan
    for index, attempt in enumerate(attempts, 1):
        times = times_of[index]
        first: Any = min(times, default=attempt.get("first_step"))
        repeated = max(0, last_step - first + 1) if times else None
        seconds = times[first] - last_time if times else None
        ended = [as_text(attempt["ended"])] if has_value(attempt.get("ended")) else []
        ended += [", ".join(map(str, attempt["lost"]))] if isinstance(attempt.get("lost"), list) else []
        cells = [index, attempt.get("nodes"), attempt.get("loaded"), first, repeated]
        texts = [as_text(cell) if has_value(cell) else NONE for cell in cells]
        rows.append([*texts, format_number(seconds), ": ".join(ended) or NONE])
        last_step, last_time = max(times, default=last_step), max(times.values(), default=last_time)
    return [Table(f"Attempts of {run.name}", COLUMNS, rows, "")]
