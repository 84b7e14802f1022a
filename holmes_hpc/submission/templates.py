"""The batch scripts under slurm/, for those who want nothing but sbatch: made from the executor's own text.

``python -m holmes_hpc.submission.templates DIR`` writes them; a test holds the ones in the repository equal to that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from holmes_hpc.submission.executor.batch_script import JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.environment import LEADER

RUN, PLAN, PYTHON = "@RUN@", "@PLAN@", "@PYTHON@"  # become variables of the script
IB = ComponentRequest(2, 1, "ib", "nic_ib")
ROCE = ComponentRequest(2, 1, "roce", "nic_roce")
ETH = ComponentRequest(2, 1, "eth", "nic_ethernet")

USAGE = """\
# {what}
#
#     PLAN=plan.yaml RUN=runs/mine sbatch {name} [KEY=VALUE of the configuration]...
#
# The components below must be those of the plan (`holmes plan -o plan.yaml` shows them), in its order: partition,
# constraint, nodes, and one task a GPU (--ntasks-per-node, --gpus-per-node). Each states its own: Slurm resets these
# from component to component. PYTHON: the Python that has holmes_hpc, on every node. The run directory must be on a
# file system that all nodes share. Made by holmes_hpc.submission.templates.
"""


def _template(name: str, what: str, parts: tuple[ComponentRequest, ...], *, restarts: int = 0,
              container: str | None = None) -> str:
    per_node = [(f"HOLMES_TASKS_PER_NODE_{i}", str(c.tasks_per_node)) for i, c in enumerate(parts)]
    job = JobRequest(
        parts, name="holmes", timeout_min=60, output="holmes-%j.txt", rank_output=f"{RUN}/logs/rank-%t.txt",
        step_errors=f"{RUN}/logs/srun.txt", requeue=True, environment=((LEADER, "%j"), *per_node),
        container=container)
    judge = f'{PYTHON} -m holmes_hpc.submission.lifecycle.finish {RUN} "$status" "$signalled"'
    inner = "python3" if container else PYTHON
    text = script_text(
        job, f'{inner} -m holmes_hpc.train plan_file={RUN}/plan.yaml run_dir={RUN} "$@"',
        begin=["run=${RUN:-runs/$SLURM_JOB_ID}",
               f'{PYTHON} -m holmes_hpc.submission.lifecycle.begin {RUN} {PLAN} {restarts} "$@" || exit'],
        interrupted=[f"{judge} --so-far"], finish=[f"{judge}; status=$?"])
    for mark, variable in ((RUN, '"$run"'), (PLAN, '"${PLAN:-plan.yaml}"'), (PYTHON, '"${PYTHON:-python3}"')):
        text = text.replace(mark, variable)
    first, rest = text.split("\n", 1)
    return f"{first}\n{USAGE.format(name=name, what=what)}{rest}"


def templates() -> dict[str, str]:
    """File name -> text of every template."""
    return {
        "one_fabric.sbatch": _template("one_fabric.sbatch", "A plan on one fabric: a plain job.", (IB,)),
        "two_components.sbatch": _template(
            "two_components.sbatch", "A plan over two fabrics: one heterogeneous job, one step.", (IB, ROCE)),
        "three_components.sbatch": _template(
            "three_components.sbatch", "A plan over three fabrics: one heterogeneous job, one step.", (IB, ROCE, ETH)),
        "requeue.sbatch": _template(
            "requeue.sbatch", "As two_components, and it goes on after a failed rank or node too, at most 3 times,"
            "\n# while it gains steps (after preemption and time-outs they all do).", (IB, ROCE), restarts=3),
        "container_pyxis.sbatch": _template(
            "container_pyxis.sbatch", "As two_components, in a container of pyxis (srun --container-image).",
            (IB, ROCE), container="holmes_hpc:latest"),
        "container_apptainer.sbatch": _template(
            "container_apptainer.sbatch", "As two_components, in an apptainer image.", (IB, ROCE),
            container="holmes_hpc.sif"),
    }


def main(words: list[str]) -> int:
    directory = Path(words[0] if words else "slurm")
    for name, text in templates().items():
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
