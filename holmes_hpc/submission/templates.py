"""Batch scripts that users submit with sbatch themselves: those under slurm/, and one for any plan.

Their text is made by the same function as the executor's. ``python -m holmes_hpc.submission.templates slurm`` writes
the scripts under slurm/, and a test checks that they are up to date.
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
from holmes_hpc.tables import read_table

RUN, PLAN, PYTHON = "@RUN@", "@PLAN@", "@PYTHON@"  # placeholders for variables of the script
_TABLE: dict[str, Any] = read_table(__file__)


def plan_script(
    plan: Plan, plan_path: Path, run_dir: str, settings: SlurmSettings, overrides: Sequence[str], restarts: int = 0
) -> str:
    """Return a batch script for a plan. The script creates its run directory. Its output goes into the folder in which
    sbatch is called. `restarts`: train.max_restarts. Raise SubmissionError as :func:`plan_components` does."""
    names = ("container", "timeout_min", "setup", "distribution")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    text = _script(plan_components(plan, settings), restarts=restarts, overrides=overrides, **options)
    text = text.replace("run=${RUN:-runs/$SLURM_JOB_ID}", f'run="${{RUN:-{_quoted(run_dir)}}}"')
    plan_default, python_default = _quoted(str(plan_path.absolute())), _quoted(sys.executable)
    usage = _TABLE["usage_of_plan"].format(plan=f"plan {plan.id}")
    return _filled_in(text, usage, f"${{PLAN:-{plan_default}}}", f"${{PYTHON:-{python_default}}}")


def _filled_in(text: str, usage: str, plan: str, python: str) -> str:
    """Return the script with `plan` and `python` (shell code) for placeholders, and `usage` after its first line."""
    for placeholder, variable in ((RUN, "$run"), (PLAN, plan), (PYTHON, python)):
        text = text.replace(placeholder, f'"{variable}"')
    return text.replace("\n", f"\n{usage}", 1)


def _quoted(value: str) -> str:
    """Return `value` escaped for use between double quotes in a shell. Raise SubmissionError if that is impossible."""
    if "}" in value or not value.isprintable():
        problem = f"the path {value!r} contains a brace or a control character"
        raise SubmissionError(problem, where="template", hint="use another path")
    return re.sub(r'([\\"$`])', r"\\\1", value)


def _script(
    parts: tuple[ComponentRequest, ...], *, restarts: int = 0, overrides: Sequence[str] = (), **options: Any
) -> str:
    """Return a batch script with placeholders for run directory, plan and Python. `options`: fields of JobRequest."""
    job = JobRequest(
        parts,
        output="holmes-%j.txt",
        rank_output=f"{RUN}/logs/rank-%t.txt",
        step_errors=f"{RUN}/logs/srun.txt",
        requeue=True,
        environment=((LEADER, "%j"), *tasks_per_node(parts)),
        **options,
    )
    run_module = f'{PYTHON} -c "$bootstrap" holmes_hpc.submission.lifecycle'
    end = f'{run_module}.batch_end {RUN} "$status" "$signalled"'
    overrides = [o for o in overrides if not o.startswith(("run_dir=", "name=", "plan_file="))]  # the script sets these
    expansion_note = "# shellcheck disable=SC2016 # single quotes prevent expansion on purpose"
    set_overrides = [expansion_note, f'set -- {shlex.join(overrides)} "$@"']
    python = "python3" if job.container else PYTHON  # tasks run in the container, batch_start and batch_end outside
    return script_text(
        job,
        [
            f'{part.python or python} -c "$bootstrap" holmes_hpc.train plan_file={RUN}/plan.yaml run_dir={RUN} "$@"'
            for part in parts
        ],
        begin=[
            *(set_overrides if overrides else ()),
            "# Run a module. `python -m` would also import code from the working directory.",
            f"bootstrap={shlex.quote(START)}",
            "run=${RUN:-runs/$SLURM_JOB_ID}",
            f'{run_module}.batch_start {RUN} {PLAN} {restarts} "$@" || exit',
        ],
        monitor=f'{run_module}.lost_step {RUN} {job.ranks} "$step"',
        on_signal=[f"{end} --so-far"],
        finish=[f"{end}; status=$?"],
    )


def templates() -> dict[str, str]:
    """Return the text of every template by file name."""
    nodes = {name: ComponentRequest(2, 1, *selection) for name, selection in _TABLE["components"].items()}
    templates = {}
    for name, settings in _TABLE["templates"].items():
        usage = _TABLE["usage"].format(name=f"{name}.sbatch", summary=settings["summary"])
        parts = tuple(nodes[component] for component in settings["components"])
        arguments = {k: v for k, v in settings.items() if k not in ("summary", "components")}
        script = _script(parts, **arguments)
        templates[f"{name}.sbatch"] = _filled_in(script, usage, "${PLAN:-plan.yaml}", "${PYTHON:-python3}")
    return templates


def main(arguments: list[str]) -> None:
    directory = Path(arguments[0] if arguments else "slurm")
    for name, text in templates().items():
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)


if __name__ == "__main__":
    main(sys.argv[1:])
