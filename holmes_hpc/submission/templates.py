"""The batch scripts under slurm/, for those who want nothing but sbatch: made from the executor's own text.

``python -m holmes_hpc.submission.templates DIR`` writes them; a test holds the ones in the repository equal to that.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import SubmissionError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.submission.executor.batch_script import JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.environment import LEADER, tasks_per_node
from holmes_hpc.submission.plan_job import plan_components

RUN, PLAN, PYTHON = "@RUN@", "@PLAN@", "@PYTHON@"  # become variables of the script
IB = ComponentRequest(2, 1, "ib", "nic_ib")
ROCE = ComponentRequest(2, 1, "roce", "nic_roce")
ETH = ComponentRequest(2, 1, "eth", "nic_ethernet")

USAGE = """\
# {what}
#
#     PLAN=plan.yaml RUN=runs/mine sbatch {name} [KEY=VALUE of the configuration]...
#
# The job finds a mistyped KEY=VALUE only when it begins; `holmes submit plan.yaml KEY=VALUE... --dry-run >/dev/null`
# finds it before anything queues.
#
# The components below must be those of the plan (`holmes plan -o plan.yaml` shows them), in its order: partition,
# constraint, nodes, and one task a GPU (--ntasks-per-node, --gpus-per-node). Each states its own: Slurm resets these
# from component to component. PYTHON: the Python that has holmes_hpc, on every node. The run directory must be on a
# file system that all nodes share. Made by holmes_hpc.submission.templates.
"""


USAGE_OF_PLAN = """\
# {plan}, as a batch script that needs nothing but sbatch:
#
#     sbatch FILE [KEY=VALUE of the configuration]...
#
# The job finds a mistyped KEY=VALUE only when it begins; `holmes submit PLAN KEY=VALUE... --dry-run >/dev/null` finds
# it before anything queues, and so does writing this script with it (`--template FILE`).
#
# It takes PLAN, RUN (the run directory, on a file system that all nodes share) and PYTHON (with holmes_hpc, on every
# node) from the environment, or these:
"""


def script_for(
    plan: Plan, plan_path: Path, run_dir: str, settings: SlurmSettings, overrides: Sequence[str], restarts: int = 0
) -> str:
    """The batch script of a plan for those who want nothing but sbatch; it makes its run directory itself, and Slurm
    writes what the script says into the folder that sbatch is called in. Raises SubmissionError as submitting would."""
    text = _script(
        plan_components(plan, settings),
        restarts=restarts,
        container=settings.container,
        overrides=overrides,
        timeout_min=settings.timeout_min,
        setup=settings.setup,
        distribution=settings.distribution,
    )
    text = text.replace("run=${RUN:-runs/$SLURM_JOB_ID}", f'run="${{RUN:-{_inside(run_dir)}}}"')
    plan_variable = f"${{PLAN:-{_inside(str(plan_path.absolute()))}}}"
    python = f"${{PYTHON:-{_inside(sys.executable)}}}"
    return _finished(text, USAGE_OF_PLAN.format(plan=f"Plan {plan.id}"), plan_variable, python)


def _finished(text: str, usage: str, plan: str, python: str) -> str:
    """Return the script with its variables in place of the marks, and `usage` after its first line."""
    for mark, variable in ((RUN, "$run"), (PLAN, plan), (PYTHON, python)):
        text = text.replace(mark, f'"{variable}"')
    return text.replace("\n", f"\n{usage}", 1)


def _inside(value: str) -> str:
    """A text as it stands between double quotes of a shell."""
    if "}" in value or not value.isprintable():
        raise SubmissionError(
            f"the path {value!r} holds a brace or a control character", where="template", hint="use another path"
        )
    return re.sub(r'([\\"$`])', r"\\\1", value)


def _template(
    name: str, what: str, parts: tuple[ComponentRequest, ...], *, restarts: int = 0, container: str | None = None
) -> str:
    return _finished(
        _script(parts, restarts=restarts, container=container),
        USAGE.format(name=name, what=what),
        "${PLAN:-plan.yaml}",
        "${PYTHON:-python3}",
    )


def _script(
    parts: tuple[ComponentRequest, ...],
    *,
    restarts: int,
    container: str | None,
    timeout_min: int | str = 60,
    setup: Sequence[str] = (),
    distribution: str = "block:block",
    overrides: Sequence[str] = (),
) -> str:
    """The script with marks for run directory, plan and Python."""
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
    judge = f'{PYTHON} -m holmes_hpc.submission.lifecycle.finish {RUN} "$status" "$signalled"'
    inner = "python3" if container else PYTHON
    own = [o for o in overrides if not o.startswith(("run_dir=", "name=", "plan_file="))]  # it says these
    said = ["# shellcheck disable=SC2016 # no expansion wanted", f'set -- {shlex.join(own)} "$@"'] if own else []
    return script_text(
        job,
        f'{inner} -m holmes_hpc.train plan_file={RUN}/plan.yaml run_dir={RUN} "$@"',
        begin=[
            *said,
            "run=${RUN:-runs/$SLURM_JOB_ID}",
            f'{PYTHON} -m holmes_hpc.submission.lifecycle.begin {RUN} {PLAN} {restarts} "$@" || exit',
        ],
        on_signal=[f"{judge} --so-far"],
        finish=[f"{judge}; status=$?"],
    )


def templates() -> dict[str, str]:
    """File name -> text of every template."""
    return {
        "one_fabric.sbatch": _template("one_fabric.sbatch", "A plan on one fabric: a plain job.", (IB,)),
        "two_components.sbatch": _template(
            "two_components.sbatch", "A plan over two fabrics: one heterogeneous job, one step.", (IB, ROCE)
        ),
        "three_components.sbatch": _template(
            "three_components.sbatch", "A plan over three fabrics: one heterogeneous job, one step.", (IB, ROCE, ETH)
        ),
        "requeue.sbatch": _template(
            "requeue.sbatch",
            "As two_components, and it goes on after a failed rank or node too, at most 3 times,"
            "\n# while it gains steps (after preemption and time-outs they all do).",
            (IB, ROCE),
            restarts=3,
        ),
        "container_pyxis.sbatch": _template(
            "container_pyxis.sbatch",
            "As two_components, in a container of pyxis (srun --container-image).",
            (IB, ROCE),
            container="holmes_hpc:latest",
        ),
        "container_apptainer.sbatch": _template(
            "container_apptainer.sbatch",
            "As two_components, in an apptainer image.",
            (IB, ROCE),
            container="holmes_hpc.sif",
        ),
    }


def main(arguments: list[str]) -> int:
    directory = Path(arguments[0] if arguments else "slurm")
    for name, text in templates().items():
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
