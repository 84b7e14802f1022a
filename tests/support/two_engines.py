"""Comparison of two Megatron-Cores: same losses in every layout, and checkpoints that both can continue.

    python tests/support/two_engines.py COMMAND...

COMMAND starts the other Python, which has this project's packages with another Megatron-Core. Exit code 1: a loss of
STEPS steps differs by more than ERROR, relatively. `make test-current` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS, ERROR = 20, 1e-5
LIMIT_S = 600  # for one training, enough for a busy machine
CONTINUED = ("dp2", "dp4 hierarchical", "pp2 interleaved", "tp2 sequence parallel", "tp2 pp2 dp2")


def train(directory: Path, name: str, until: int) -> list[float]:
    """Train layout `name` in `directory` until `until` steps are done; return all recorded losses."""
    import spawn
    from test_layouts import LAYOUTS

    layout, train_options = LAYOUTS[name]
    ended = spawn.begin(
        directory,
        spawn.plan(**layout),
        {"train": {"steps": until, "lr_decay_steps": STEPS, "checkpoint_interval": STEPS // 2, **train_options}},
    ).finish(LIMIT_S)
    assert set(ended.codes) == {0}, ended.output
    return ended.column("loss")


def answer() -> None:
    """Answer each input line ``[place, layout, steps]`` with the result of :func:`train`."""
    print(version("megatron-core"), sys.version.split()[0], flush=True)
    for line in sys.stdin:
        place, name, until = json.loads(line)
        print(json.dumps(train(Path(place), name, until)), flush=True)


class Engine:
    """A Python process that trains on demand."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen([*command, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name, python = self._hear().split()
        print(f"Megatron-Core {self.name} on Python {python}", flush=True)

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("two_engines: a Python process exited")
        return line

    def losses(self, place: Path, layout: str, until: int = STEPS) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(place), layout, until]) + "\n")
        self._process.stdin.flush()
        losses: list[float] = json.loads(self._hear())
        return losses

    def end(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def largest_difference(losses: list[float], other_losses: list[float]) -> float:
    """Return the largest relative difference."""
    assert len(losses) == len(other_losses) == STEPS, (len(losses), len(other_losses))
    return max(abs(a - b) / abs(a) for a, b in zip(losses, other_losses, strict=True))


def compare(command: list[str], place: Path) -> bool:
    from test_layouts import LAYOUTS

    engines, is_equal = [Engine([sys.executable]), Engine(command)], True

    def report(label: str, difference: float) -> None:
        nonlocal is_equal
        is_equal = is_equal and difference <= ERROR
        print(f"{'ok' if difference <= ERROR else 'NO'}  {difference:.1e}  {label}", flush=True)

    for layout in LAYOUTS:
        uninterrupted = [
            engine.losses(place / f"{layout}-{i}".replace(" ", "_"), layout) for i, engine in enumerate(engines)
        ]
        report(layout, largest_difference(*uninterrupted))
        for first, second in ((0, 1), (1, 0)) if layout in CONTINUED else ():
            directory = place / f"{layout}-{first}-{second}".replace(" ", "_")
            engines[first].losses(directory, layout, STEPS // 2)
            report(
                f"{layout}: {engines[second].name} continues {engines[first].name}'s checkpoint",
                largest_difference(uninterrupted[first], engines[second].losses(directory, layout)),
            )
    for engine in engines:
        engine.end()
    return is_equal


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "training")]
    if len(sys.argv) == 1:
        answer()
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="holmes-engines-") as folder:
        sys.exit(not compare(sys.argv[1:], Path(folder)))
