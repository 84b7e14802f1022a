"""The live table of `holmes status --watch`, and the columns of `holmes status`."""

import contextlib
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rich.table import Column, Table

from holmes_hpc import console
from holmes_hpc.errors import ConfigError
from holmes_hpc.records.find import last_change
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import Status, run_statuses
from holmes_hpc.submission.sweeps.sweep_table import live_display

SCAN_SHARE = 0.1  # largest share of the time that may be spent looking for new runs
# column -> width that the terminal needs to show the column
COLUMNS = {"run": 0, "last change": 100, "job": 80, "state": 0, "step": 0, "loss": 0, "step time": 0, "attempt": 100}


def cells(status: Status) -> list[str]:
    """Return the cells of a run's row, one for each of COLUMNS."""
    changed = time.strftime("%m-%d %H:%M", time.localtime(last_change(RunDirectory(status.path))))
    state = f"{status.state} ({status.why})" if status.why else status.state
    step = f"{status.step}/{status.steps}" if status.step else ""
    step_time = f"{status.step_time_s:.3f} s" if status.step_time_s else ""
    loss = f"{status.loss:.4f}" if status.loss else ""
    return [status.name, changed, status.job_id or "", state, step, loss, step_time, str(status.attempt)]


def live_table(statuses: Sequence[Status], width: int, height: int, hidden: int = 0) -> Table:
    """Return the table for a terminal of `width` columns and `height` lines. Active runs come first; otherwise the
    order of `statuses` is kept. `hidden`: number of runs that `statuses` leaves out."""
    rows = sorted(statuses, key=lambda status: status.ended)[: max(1, height - 4)]
    counts = ", ".join(f"{count} {state}" for state, count in Counter(s.state for s in statuses).most_common())
    hidden += len(statuses) - len(rows)
    shown = [name for name, least in COLUMNS.items() if width >= least]
    max_widths = {"run": None, "state": max(9, width // 4)}  # other columns are not cut
    columns = [Column(name, no_wrap=name not in max_widths, max_width=max_widths.get(name)) for name in shown]
    texts = [[text for name, text in zip(COLUMNS, cells(row), strict=True) if name in shown] for row in rows]
    caption = f"{hidden} more; q leaves" if hidden else "q leaves"
    return console.live_table(f"{time.strftime('%H:%M:%S')}  {counts or 'no runs'}", caption, columns, texts, cut=True)


def watch(find_runs: Callable[[], tuple[list[RunDirectory], int]]) -> None:
    """Show a live table of runs until q or Ctrl-C is pressed. `find_runs`: returns the runs to show, and the number of
    runs that it leaves out. Raise ConfigError if stdin or stdout is not a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("there is no terminal", where="--watch", hint="leave out --watch, or use --json")
    ended: dict[tuple[str, float], Status] = {}
    scanned_at, scan_s, mode = 0.0, 0.0, "force"
    with live_display() as display, _pressed_key() as pressed, contextlib.suppress(KeyboardInterrupt):
        while True:
            if time.monotonic() - scanned_at >= scan_s / SCAN_SHARE:
                started = time.monotonic()
                runs, hidden = find_runs()
                scanned_at, scan_s = time.monotonic(), time.monotonic() - started
            runs = [run for run in runs if run.exists()]  # some may be removed meanwhile
            keys = {run: (str(run.path), last_change(run)) for run in runs}
            active = [run for run in runs if keys[run] not in ended]
            statuses = dict(zip(active, run_statuses(active, mode), strict=True)) if active else {}
            ended |= {keys[run]: status for run, status in statuses.items() if status.ended}
            rows, size = [statuses.get(run) or ended[keys[run]] for run in runs], display.console.size
            display.update(live_table(rows, size.width, size.height, hidden), refresh=True)
            mode = "standard"
            if pressed(console.REFRESH_S) == "q":
                return


@contextlib.contextmanager
def _pressed_key() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits at most the given seconds for a key press. It returns the key; "" if none came."""
    settings = termios.tcgetattr(sys.stdin)

    def wait(seconds: float) -> str:
        return sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(sys.stdin)
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
