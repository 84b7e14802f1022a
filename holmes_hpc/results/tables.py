"""Tables of one run, ready to print. Names of columns have units, and captions say whether compute was emulated."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from holmes_hpc.console import NONE, data_size
from holmes_hpc.errors import counted
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import family_values, has_value, stage_parts
from holmes_hpc.results.plans import NIC_WORDS, nic_types
from holmes_hpc.results.statistics import percentage_errors
from holmes_hpc.tables import read_table

_TABLE: dict[str, dict[str, str]] = read_table(__file__)


class Table(NamedTuple):
    """A table to print: each of `rows` has one cell for each of `columns`."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str

    @classmethod
    def of(cls, title: str, frame: pd.DataFrame, caption: str) -> "Table":
        """Return the table of a DataFrame of texts."""
        return cls(title, list(map(str, frame)), frame.astype(str).to_numpy().tolist(), caption)


def format_number(value: Any, digits: int = 3) -> str:
    """Return a number as text with `digits` significant digits and no exponent; a dash if it is missing."""
    if not has_value(value):
        return NONE
    figure = float(value)
    if figure == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(figure))))
    return f"{figure:,.{places}f}"


def as_text(value: Any) -> str:
    """Return a value as text, whole floats without a decimal point; a dash if it is missing."""
    if not has_value(value):
        return NONE
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def format_percent(value: Any) -> str:
    return f"{float(value):+.1f}%" if has_value(value) else NONE


def format_interval(low: Any, high: Any) -> str:
    return f"{format_number(low)} to {format_number(high)}" if has_value(low) and has_value(high) else NONE


def interval_note(low: Any, high: Any) -> str:
    """Return an interval in brackets, with a leading space; an empty text if there is no interval."""
    return f" ({format_interval(low, high)})" if has_value(low) else ""


def pace_note(run: Mapping[str, Any]) -> str:
    """Return a text that says whether compute was real or emulated, for the caption of every table of measurements."""
    if has_value(pace_ms := run.get("pace_layer_ms")):
        return f"emulated compute: {float(pace_ms or 0):g} ms per layer forward, twice that backward"
    return "real compute" if run.get("state") != "unreadable" else "compute not recorded"


def basis_note(run: Mapping[str, Any]) -> str:
    """Return a text that says which steps the figures are from, and whether compute was real."""
    names = ("steps", "earlier_steps", "warmup_steps")
    count, earlier, warmup = (int(run[name]) if has_value(run[name]) else 0 for name in names)
    steps = f"{counted(count - earlier - warmup, 'step')} after {counted(warmup, 'warm-up step')}"
    return f"{steps}{f' and {earlier} under an earlier plan' if earlier else ''}; {pace_note(run)}"


def throughput(run: Mapping[str, Any], plan: Mapping[str, Any]) -> Table:
    """Return the table of a run's measured figures with their intervals, beside the predicted ones."""
    predicted = plan.get("predicted") or {}
    # A plan predicts GPU memory, not the memory of a process.
    memory = predicted.get("memory_bytes_per_gpu") if run["device"] != "cpu" else None
    bounds, peak = (run["step_time_low_s"], run["step_time_high_s"]), run["peak_memory_bytes"]
    rows = [_figure("step time, s (median)", run["step_time_s"], predicted.get("step_time_s"), bounds)]
    for text, name in _TABLE["rates"].items():
        rows.append(_figure(text, run[name], predicted.get(name), hide_error=name != "tokens_per_s"))
    rows.append(_figure("peak memory, GiB (maximum over ranks)", _gib(peak), _gib(max(memory or [math.nan]))))
    if has_value(run["goodput"]) and run["attempts"] > 1:
        rows.append(["seconds in steps that were not repeated", f"{run['goodput']:.0%}", "", "", ""])
    losses = f"{format_number(run['first_loss'], 4)} to {format_number(run['loss'], 4)}"
    rows.append(["loss, first to last step", losses, "", "", ""])
    if has_value(run["validation_loss"]):
        rows.append(["validation loss, last", format_number(run["validation_loss"], 4), "", "", ""])
    columns = ["figure", "measured", "95% interval", "predicted", "error of prediction"]
    return Table(f"Throughput of {run['name']}", columns, rows, basis_note(run))


def _figure(
    name: str, value: Any, predicted: Any, bounds: tuple[Any, Any] = (None, None), hide_error: bool = False
) -> list[str]:
    """Return a row of :func:`throughput`. `bounds`: lower and upper end of the interval. `hide_error`: leave out the
    prediction error, for rates: it would have the opposite sign of the step time's error."""
    error = float(percentage_errors([predicted], [value])[0]) if has_value(predicted) and has_value(value) else math.nan
    error_text = "" if hide_error else format_percent(error)
    return [name, format_number(value), format_interval(*bounds), format_number(predicted), error_text]


def _gib(value: Any) -> float:
    return float(value) / 2**30 if has_value(value) else math.nan


def stages(run: Mapping[str, Any], plan: Mapping[str, Any]) -> Table:
    """Return the table of each pipeline stage's step time: each part in seconds and as a share of the step."""
    plan_stages, types, step_s = plan.get("stages") or [], nic_types(plan), run["step_time_s"]
    rows = []
    for index, parts in enumerate(stage_parts(run)):
        plan_stage = plan_stages[index] if index < len(plan_stages) else {}
        fabric = str(plan_stage.get("fabric", NONE))
        known = {p: parts[p] for p in PARTS if step_s and has_value(parts.get(p))}
        shares = [f"{format_number(known[p])} {known[p] / step_s:.0%}" if p in known else NONE for p in PARTS]
        place = f"{fabric} ({NIC_WORDS.get(types.get(fabric, ''), '?')})"
        rows.append([str(index), place, str(plan_stage.get("layers", NONE)), *shares])
    columns = ["stage", "fabric", "layers", *(PART_NAMES[p] for p in PARTS)]
    caption = f"medians over {basis_note(run)}; mean over a stage's ranks"
    return Table("Step time by stage: seconds, share of the step", columns, rows, caption)


def traffic(run: Mapping[str, Any], plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bytes that all nodes together send per step, as one mapping per network (a fabric, or ethernet).

    Keys: `kind` (name of the network), `nic` (type of its NICs), `planned_bytes` (planned payload), `counted_bytes`
    (bytes counted by the NICs), `header_factor`, `payload_bytes` (counted bytes divided by the header factor),
    `difference_percent` (payload divided by planned bytes, minus 100%). Unknown values are None."""
    planned, sent = family_values(run, "planned_bytes_per_step"), family_values(run, "tx_bytes_per_step")
    factors, types = family_values(run, "header_factors"), nic_types(plan)
    rows = []
    for kind in sorted({*planned, *sent}, key=lambda k: (k == "ethernet", k)):
        factor = factors.get(kind, run.get("header_factor"))
        factor = factor if has_value(factor) else None
        sent_bytes, plan_bytes = sent.get(kind, 0.0 if sent else None), planned.get(kind)
        payload = sent_bytes / factor if has_value(sent_bytes) and factor else None
        difference = 100 * (payload / plan_bytes - 1) if payload is not None and plan_bytes else None
        row = {"kind": kind, "nic": types.get(kind, kind if kind == "ethernet" else None)}
        row |= {"planned_bytes": plan_bytes, "counted_bytes": sent_bytes, "header_factor": factor}
        rows.append(row | {"payload_bytes": payload, "difference_percent": difference})
    return rows


def traffic_table(run: Mapping[str, Any], plan: Mapping[str, Any]) -> Table:
    """Return :func:`traffic` as a table, with a row for the bytes sent before the first step."""
    title, note = "Bytes sent per step, all nodes together", basis_note(run)
    no_plan_bytes = "none" if plan.get("predicted") else NONE
    setup = {k: v for k, v in family_values(run, "setup_tx_bytes").items() if v}
    rows = []
    for r in traffic(run, plan):
        planned = no_plan_bytes if r["planned_bytes"] is None else data_size(r["planned_bytes"])
        sent = [data_size(r["counted_bytes"]), format_number(r["header_factor"], 4), data_size(r["payload_bytes"])]
        rows.append([_nic_name(r), planned, *sent, format_percent(r["difference_percent"])])
    if not rows and not setup:
        node_count = sum(int(component.get("nodes") or 0) for component in plan.get("components") or [])
        reason = "none: all ranks were on one node" if node_count < 2 else "no counters"
        return Table(title, ["network", *[""] * 5], [[reason, *[""] * 5]], note)
    setup_bytes = data_size(sum(setup.values()) if setup else None)
    rows.append(["rendezvous and control, once", NONE, setup_bytes, NONE, NONE, NONE])
    parts = ", ".join(f"{kind} {data_size(count)}" for kind, count in sorted(setup.items()))
    caption = f"medians over {note}; header factor: bytes on the wire per byte of payload, measured in this run"
    caption += f"; rendezvous and control, before the first step: {parts}" if parts else ""
    columns = ["network", "planned", "counted", "header factor", "counted / factor", "difference"]
    return Table(title, columns, rows, caption)


def _nic_name(entry: Mapping[str, Any]) -> str:
    kind, nic = entry["kind"], entry["nic"]
    if nic is None:
        return str(kind)
    return "Ethernet, all nodes" if kind == "ethernet" else f"{kind} ({NIC_WORDS.get(nic, nic)})"


def transports(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a mapping for each distinct `kind`, `transport`, `nic` and `fabric` of the plan's process groups.

    A mapping also has the number of such `groups`, and the `ranks` of the first of these groups."""
    defaults = {"kind": NONE, "transport": NONE, "nic": None, "fabric": None}
    pairs = []
    for group in plan.get("transports") or []:
        key = tuple((name, str(group[name]) if group.get(name) else default) for name, default in defaults.items())
        pairs.append((key, list(group.get("ranks") or [])))
    return [{**dict(key), "groups": len(ranks), "ranks": ranks[0]} for key, ranks in grouped(pairs)]


def transports_table(run: Mapping[str, Any], plan: Mapping[str, Any]) -> Table:
    columns = ["groups", "number", "transport", "fabric", "ranks of the first"]
    rows = []
    for t in transports(plan):
        group = _TABLE["groups"].get(t["kind"], t["kind"])
        numbers = [str(rank) for rank in t["ranks"]]
        ranks = " ".join(numbers if len(numbers) <= 6 else [*numbers[:4], "…", numbers[-1]])
        rows.append([group, str(t["groups"]), _carrier(t, run["device"]), t["fabric"] or NONE, ranks])
    caption = f"{_TABLE['modes'].get(str(run['transport']))}; {pace_note(run)}"
    return Table("Transport of each process group", columns, rows, caption)


def _carrier(entry: Mapping[str, Any], device: Any) -> str:
    if entry["transport"] == "rdma":  # CPU ranks use gloo, which has no RDMA and so uses TCP
        return f"{'TCP' if device == 'cpu' else 'RDMA'} on {NIC_WORDS.get(entry['nic'] or '', entry['nic'])}"
    return {"tcp": "TCP on Ethernet", "local": "inside a node"}.get(entry["transport"], entry["transport"])


def incomplete_table(run: Mapping[str, Any]) -> Table:
    """Return the table of how an incomplete run ended: state, error, failed rank, steps."""
    rank = f"{run['failed_rank']} on {run['failed_node']}" if has_value(run["failed_rank"]) else None
    records = {"state": run["state"], "error": run["error"], "rank": rank}
    rows = [[name, str(value)] for name, value in records.items() if has_value(value)]
    rows += [["attempts", as_text(run["attempts"])], ["steps recorded", as_text(run["steps"])]]
    status = "has not ended" if run["state"] == "unfinished" else "did not complete"
    return Table(f"{run['name']} {status}", ["", "record"], rows, "")


def one_run(run: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Table]:
    """Return all tables of one run, the most important first."""
    tables = [incomplete_table(run)] if run["state"] != "completed" else []
    if has_value(run["steps"]) and run["steps"]:
        tables += [throughput(run, plan), stages(run, plan), traffic_table(run, plan)]
    return [*tables, transports_table(run, plan)] if plan.get("transports") else tables
