"""Batch scripts that users submit with sbatch themselves: those under slurm/, and one for any plan.

They have the same text as the executor's. ``python -m holmes_hpc.submission.templates slurm`` writes those under
slurm/, and a test compares them.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import SubmissionError
from holmes_hpc.interpreter import START
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.submission.executor.batch_script import JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.environment import LEADER, tasks_per_node
from holmes_hpc.submission.plan_job import plan_components

RUN, PLAN, PYTHON = "@RUN@", "@PLAN@", "@PYTHON@"  # placeholders for variables of the script
IB = ComponentRequest(2, 1, "ib", "nic_ib")
ROCE = ComponentRequest(2, 1, "roce", "nic_roce")
ETH = ComponentRequest(2, 1, "eth", "nic_ethernet")

USAGE = """\
# {summary}
#
#     PLAN=plan.yaml RUN=runs/mine sbatch {name} [KEY=VALUE...]
#
# KEY=VALUE sets a key of the configuration. The job checks it only when it starts. To check it before the job is
# queued, run `holmes submit plan.yaml KEY=VALUE... --dry-run >/dev/null`.
#
# Replace the components below (#SBATCH lines from --partition on) by those of your plan, in the plan's order (`holmes
# plan -o plan.yaml` prints them): partition, constraint, nodes, and one task per GPU (--ntasks-per-node,
# --gpus-per-node). Repeat these options in each component, because Slurm resets them.
#
# RUN: the run directory, on a file system that all nodes share. PYTHON: a Python with holmes_hpc, at the same path on
# every node (default: python3). Written by `python -m holmes_hpc.submission.templates slurm`; change it there.
"""


USAGE_OF_PLAN = """\
# Batch script of {plan}. Submit it without the `holmes` command:
#
#     sbatch FILE [KEY=VALUE...]
#
# KEY=VALUE sets a key of the configuration. The job checks it only when it starts. To check it before the job is
# queued, run `holmes submit PLAN KEY=VALUE... --dry-run >/dev/null`, or write this script again with KEY=VALUE
# (`holmes submit PLAN KEY=VALUE... --template FILE`).
#
# The script reads these environment variables: PLAN, RUN (the run directory, on a file system that all nodes share)
# and PYTHON (a Python with holmes_hpc, at the same path on every node). Defaults are set below #SBATCH:
"""


def plan_script(
    plan: Plan, plan_path: Path, run_dir: str, settings: SlurmSettings, overrides: Sequence[str], restarts: int = 0
) -> str:
    """Return a batch script for a plan, which creates its run directory itself. Its own output goes into the folder in
    which sbatch is called. `restarts`: train.max_restarts. Raise SubmissionError as :func:`plan_components` does."""
    text = _script(
        plan_components(plan, settings),
        restarts=restarts,
        container=settings.container,
        overrides=overrides,
        timeout_min=settings.timeout_min,
        setup=settings.setup,
        distribution=settings.distribution,
    )
    text = text.replace("run=${RUN:-runs/$SLURM_JOB_ID}", f'run="${{RUN:-{_quoted(run_dir)}}}"')
    plan_default, python_default = _quoted(str(plan_path.absolute())), _quoted(sys.executable)
    usage = USAGE_OF_PLAN.format(plan=f"plan {plan.id}")
    return _filled_in(text, usage, f"${{PLAN:-{plan_default}}}", f"${{PYTHON:-{python_default}}}")


def _filled_in(text: str, usage: str, plan: str, python: str) -> str:
    """Return the script with `plan` and `python` (shell code) in place of the placeholders, and with the comment
    `usage` after its first line."""
    for placeholder, variable in ((RUN, "$run"), (PLAN, plan), (PYTHON, python)):
        text = text.replace(placeholder, f'"{variable}"')
    return text.replace("\n", f"\n{usage}", 1)


def _quoted(value: str) -> str:
    """Return `value` escaped for use between double quotes in a shell. Raise SubmissionError if it cannot be."""
    if "}" in value or not value.isprintable():
        raise SubmissionError(
            f"the path {value!r} contains a brace or a control character", where="template", hint="use another path"
        )
    return re.sub(r'([\\"$`])', r"\\\1", value)


def _script(
    parts: tuple[ComponentRequest, ...],
    *,
    restarts: int = 0,
    container: str | None = None,
    timeout_min: int | str = 60,
    setup: Sequence[str] = (),
    distribution: str = "block:block",
    overrides: Sequence[str] = (),
) -> str:
    """Return a batch script with placeholders for run directory, plan and Python."""
    job = JobRequest(
        parts,
        name="holmes",
        timeout_min=timeout_min,
        setup=tuple(setup),
        distribution=distribution,
        output="holmes-%j.txt",
        rank_output=f"{RUN}/logs/rank-%t.txt",
        step_errors=f"{RUN}/logs/srun.txt",
        requeue=True,
        environment=((LEADER, "%j"), *tasks_per_node(parts)),
        container=container,
    )
    start = f'{PYTHON} -c "$start" holmes_hpc.submission.lifecycle'
    end = f'{start}.batch_end {RUN} "$status" "$signalled"'
    overrides = [o for o in overrides if not o.startswith(("run_dir=", "name=", "plan_file="))]  # the script sets these
    set_overrides = [
        "# shellcheck disable=SC2016 # single quotes prevent expansion on purpose",
        f'set -- {shlex.join(overrides)} "$@"',
    ]
    python = "python3" if container else PYTHON
    return script_text(
        job,
        f'{python} -c "$start" holmes_hpc.train plan_file={RUN}/plan.yaml run_dir={RUN} "$@"',
        begin=[
            *(set_overrides if overrides else ()),
            "# Run a module. `python -m` would also import code from the working directory.",
            f"start={shlex.quote(START)}",
            "run=${RUN:-runs/$SLURM_JOB_ID}",
            f'{start}.batch_start {RUN} {PLAN} {restarts} "$@" || exit',
        ],
        beside=f'{start}.lost_step {RUN} {job.ranks} "$step"',
        on_signal=[f"{end} --so-far"],
        finish=[f"{end}; status=$?"],
    )


def templates() -> dict[str, str]:
    """Return the text of every template by file name."""
    several = "fabrics: one heterogeneous job, one step."
    templates: dict[str, tuple[str, tuple[ComponentRequest, ...], dict[str, Any]]] = {  # summary, components, settings
        "one_fabric": ("A plan on one fabric: a plain job.", (IB,), {}),
        "two_components": (f"A plan over two {several}", (IB, ROCE), {}),
        "three_components": (f"A plan over three {several}", (IB, ROCE, ETH), {}),
        "requeue": (
            "As two_components.sbatch, and also restarts after a failed rank or node: at most 3 times, as long as it"
            "\n# makes new steps. (All templates restart after preemption and the time limit.)",
            (IB, ROCE),
            {"restarts": 3},
        ),
        "container_pyxis": (
            "As two_components.sbatch, in a container of pyxis (srun --container-image).",
            (IB, ROCE),
            {"container": "holmes_hpc:latest"},
        ),
        "container_apptainer": (
            "As two_components.sbatch, in an apptainer image.",
            (IB, ROCE),
            {"container": "holmes_hpc.sif"},
        ),
    }
    return {
        f"{name}.sbatch": _filled_in(
            _script(parts, **settings),
            USAGE.format(name=f"{name}.sbatch", summary=summary),
            "${PLAN:-plan.yaml}",
            "${PYTHON:-python3}",
        )
        for name, (summary, parts, settings) in templates.items()
    }


def main(arguments: list[str]) -> int:
    directory = Path(arguments[0] if arguments else "slurm")
    for name, text in templates().items():
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
