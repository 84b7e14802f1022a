"""Two Megatron-Cores, this Python's and another's: the same losses in every layout, and each goes on from the other's
checkpoint.

    python tests/support/two_engines.py COMMAND...

COMMAND starts the other Python, which has this project's packages with another Megatron-Core. Exit code 1 where a loss
of STEPS steps differs by more than ERROR, relatively. `make test-current` runs it.
"""

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
LIMIT_S = 600  # for one training, on a busy machine too
CONTINUED = ("dp2", "dp4 hierarchical", "pp2 interleaved", "tp2 sequence parallel", "tp2 pp2 dp2")


def train(place: Path, name: str, until: int) -> list[float]:
    """The losses that a run of layout `name` in `place` has recorded when it has made `until` of its steps."""
    import spawn
    from test_layouts import LAYOUTS

    layout, more = LAYOUTS[name]
    ended = spawn.begin(
        place,
        spawn.plan(**layout),
        {"train": {"steps": until, "lr_decay_steps": STEPS, "checkpoint_interval": STEPS // 2, **more}},
    ).finish(LIMIT_S)
    assert set(ended.codes) == {0}, ended.output
    return ended.column("loss")


def answer() -> None:
    """For every line ``[place, layout, steps]`` on the input, a line with what :func:`train` says of it."""
    print(version("megatron-core"), sys.version.split()[0], flush=True)
    for line in sys.stdin:
        place, name, until = json.loads(line)
        print(json.dumps(train(Path(place), name, until)), flush=True)


class Engine:
    """A Python that trains on demand."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen([*command, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name, python = self._hear().split()
        print(f"Megatron-Core {self.name} on Python {python}", flush=True)

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("two_engines: a Python has ended")
        return line

    def losses(self, place: Path, layout: str, until: int = STEPS) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(place), layout, until]) + "\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._hear())
        return found

    def end(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def furthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    assert len(one) == len(other) == STEPS, (len(one), len(other))
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def compare(command: list[str], place: Path) -> bool:
    from test_layouts import LAYOUTS

    engines, well = [Engine([sys.executable]), Engine(command)], True

    def tell(what: str, difference: float) -> None:
        nonlocal well
        well = well and difference <= ERROR
        print(f"{'ok' if difference <= ERROR else 'NO'}  {difference:.1e}  {what}", flush=True)

    for layout in LAYOUTS:
        whole = [engine.losses(place / f"{layout}-{i}".replace(" ", "_"), layout) for i, engine in enumerate(engines)]
        tell(layout, furthest(*whole))
        for first, second in ((0, 1), (1, 0)) if layout in CONTINUED else ():
            at = place / f"{layout}-{first}-{second}".replace(" ", "_")
            engines[first].losses(at, layout, STEPS // 2)
            tell(
                f"{layout}: {engines[second].name} goes on from {engines[first].name}'s checkpoint",
                furthest(whole[first], engines[second].losses(at, layout)),
            )
    for engine in engines:
        engine.end()
    return well


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "training")]
    if len(sys.argv) == 1:
        answer()
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="holmes-engines-") as folder:
        sys.exit(not compare(sys.argv[1:], Path(folder)))
