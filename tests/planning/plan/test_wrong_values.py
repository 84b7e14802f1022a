"""Wrong values in a plan or a calibration file: one line with the file, the key and the allowed values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sites import two_clusters

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import HolmesError
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan

WRONG = ("3", -1, 2.5, None, [], ["x"], {"x": 1}, [[1]], 10**30)
OLDER = {
    "device": "cpu",
    "pace_layer_ms": 10.0,
    "dtype": "fp32",
    "optimizer_s": 1e-9,
    "pass_s": 0.0,
    "step_s": 0.0,
    "parts": [
        {"part": "layer", "hidden": 64, "tokens": 128, "tp": 1, "flops": 1e6, "forward_s": 0.01, "backward_s": 0.02}
    ],
    "links": {"ib": {"latency_s": 1e-5, "efficiency": 0.9}},
    "made": "2026",
}
CALIBRATION = {
    "fabrics": [
        {
            "fabric": "ib-a",
            "gpu": "cpu",
            "device": "cpu",
            "optimizer_s": 1e-9,
            "pass_s": 0.0,
            "parts": [
                {
                    "part": "layer",
                    "hidden": 64,
                    "tokens": 128,
                    "tp": 1,
                    "flops": 1e6,
                    "forward_s": 0.01,
                    "backward_s": 0.02,
                    "sequence": 64,
                    "sequence_parallel": False,
                }
            ],
            "links": {"ib": {"latency_s": 1e-5, "efficiency": 0.9}},
        }
    ],
    "between": [{"between": ["ib-a", "roce-a"], "gbps": 9.5, "delay_ms": 2.0}],
    "pace_layer_ms": 10.0,
    "step_s": 0.0,
    "dtype": "fp32",
    "made": "2026",
}


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    options = PlanOptions(strategy="hierarchical-dp", tp=1, pp=2, dp=8, nodes={"ib-a": 1, "roce-a": 1})
    return best_plan(named("gpt_3_6b"), Batch(768, 4, 2048), two_clusters(2), options, Costs()).to_dict()


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key of nested data; of lists only the first entry."""
    if at:
        yield at
    inside = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, value in inside:
        yield from places(value, (*at, key))


def changed(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    made = inner = copy.deepcopy(data)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return made


@pytest.mark.integration
def test_any_wrong_value_of_a_plan_gives_one_line(plan: dict[str, Any]) -> None:
    """Any value at any key is read, or refused with an error of this project."""
    refused = 0
    for at in places(plan):
        for value in WRONG:
            try:
                Plan.from_dict(changed(plan, at, value), "plan.yaml")
            except HolmesError as e:
                refused += 1
                line = str(e)
                assert line.startswith("plan.yaml") and "\n" not in line and e.hint and len(line) < 400, (at, value)
    assert refused > 600


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("components", 0, "nodes"), "two", "component ib-a: nodes is 'two'; use a whole number from 1"),
        (("components", 1), 3, "components[1]: is 3, not keys with values"),
        (("batch", "micro_size"), 2.5, "batch.micro_size is 2.5; use a whole number from 1 (sequences)"),
        (("stages", 0, "tp"), True, "stages[0]: tp is True; use a whole number from 1"),
        (("parallel", "ordr"), 1, "parallel: unknown key 'ordr'; did you mean 'order'?"),
        (
            ("schedule", "kind"),
            "1fb1",
            "schedule: kind is '1fb1'; use 1f1b, interleaved, ahead, zero_bubble (did you mean '1f1b'?)",
        ),
        (("stages", 0, "chunks"), "13", "chunks is '13'; use a list of whole numbers from 0"),
        (("recompute",), "ful", "recompute is 'ful'; use none, selective, full (did you mean 'full'?)"),
        (("bucket_bytes",), 0, "bucket_bytes is 0; use a whole number from 1 (bytes)"),
        (("site", "fabrics", 0, "nic"), "infiniband", "nic is 'infiniband'; use ib, roce, ethernet"),
        (("site", "fabrics", 0, "gpu", "memory_gib"), "80", "memory_gib is '80'; use a number above 0 (GiB)"),
        (("predicted", "step_time_s"), "fast", "predicted: step_time_s is 'fast'; use a number"),
        (("predicted", "nic_bytes_per_step"), {"ib-a": "many"}, "predicted: nic_bytes_per_step is {'ib-a': 'many'}"),
        (("transports", 3, "ranks"), [0, 99], "transports[3]: it is {"),
        (("transports", 3, "nic"), "eth", "transports[3]: it is {"),
        (("version",), "3", "plan version 3, this release reads 1 to 3"),
    ],
)
def test_a_wrong_value_of_a_plan_is_named(
    plan: dict[str, Any], at: tuple[Any, ...], value: Any, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(changed(plan, at, value)), encoding="utf-8")
    with pytest.raises(HolmesError) as refused:
        Plan.read(path)
    assert says in str(refused.value) and str(refused.value).startswith(f"{path}: ") and refused.value.exit_code == 2


def test_all_mistakes_of_a_plan_are_named_at_once(plan: dict[str, Any], tmp_path: Path) -> None:
    bad = changed(changed(plan, ("recompute",), "ful"), ("batch", "global_size"), 0)
    bad = changed(changed(bad, ("stages", 0, "layrs"), 3), ("name",), "x")
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(bad), encoding="utf-8")
    with pytest.raises(HolmesError) as refused:
        Plan.read(path)
    lines = [str(error) for error in (refused.value, *refused.value.others)]
    assert len(lines) == 4 and all(line.startswith(f"{path}: ") for line in lines)
    for words in ("unknown key 'name'", "recompute is 'ful'", "global_size is 0", "stages[0]: unknown key 'layrs'"):
        assert sum(words in line for line in lines) == 1, lines


@pytest.mark.parametrize(
    "missing",
    ["edge_connections", "bucket_bytes", "unused", "alternatives", "transports", "assumptions", "predicted", "version"],
)
def test_keys_that_an_older_plan_lacks_get_their_defaults(plan: dict[str, Any], missing: str) -> None:
    older = {k: v for k, v in plan.items() if k != missing}
    read = Plan.from_dict(older)
    assert read.parallel == Plan.from_dict(plan).parallel
    notes = [a for a in read.assumptions if a.startswith("the plan is older")]
    assert notes == (
        [f"the plan is older and lacks {missing}: the defaults are used"]
        if missing in ("edge_connections", "bucket_bytes")
        else []
    )
    assert Plan.from_dict(read.to_dict()).assumptions == read.assumptions  # not repeated


@pytest.mark.parametrize("content", ["", "3", "[]", "just words", "{1: 2}", "a: [", "\x00"])
def test_a_file_that_is_no_plan_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(HolmesError) as refused:
        Plan.read(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


def costs(data: Any, tmp_path: Path) -> Costs:
    path = tmp_path / "cal.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return request.costs(load([f"calibration={path}", "train.pace_layer_ms=10", "train.dtype=fp32", "launcher=local"]))


def test_a_calibration_is_read(tmp_path: Path) -> None:
    calibration = costs(CALIBRATION, tmp_path).calibration
    assert calibration.to_dict() == CALIBRATION


def test_a_calibration_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    calibration = costs(OLDER, tmp_path).calibration
    assert calibration.pace_layer_ms == 10 and len(calibration.fabrics) == 1
    fabric = calibration.to_dict()["fabrics"][0]
    assert fabric["parts"] == [{**OLDER["parts"][0], "sequence": 0, "sequence_parallel": False}]
    assert fabric["links"] == OLDER["links"] and fabric["device"] == "cpu" and not fabric["fabric"]


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("parts", 0, "part"), "layr", "parts[0]: part is 'layr'; use layer, embedding, head (did you mean 'layer"),
        (
            ("parts", 0, "forward_s"),
            "1",
            "calibration.parts[0]: forward_s is '1'; use a number from 0, up to 10000 (s)",
        ),
        (("parts", 0, "flops"), 0, "calibration.parts[0]: flops is 0; use a number above 0"),
        (("parts", 0, "tokns"), 1, "calibration.parts[0]: unknown key 'tokns'; did you mean 'tokens'?"),
        (("parts",), "none", "calibration: parts is 'none'; use a list of values"),
        (("parts",), ["layer"], "calibration.parts[0]: is 'layer', not keys with values"),
        (("links", "ib", "efficiency"), 0, "calibration.links.ib: efficiency is 0; use a number above 0"),
        (("links", "ib"), 3, "calibration.links.ib: is 3, not keys with values"),
        (("links", "infiniband"), {"latency_s": 0, "efficiency": 1}, "calibration.links: unknown link 'infiniband'"),
        (("optimizer_s",), "slow", "calibration: optimizer_s is 'slow'; use a number from 0, up to 1 (s), or null"),
        (("dtype",), "bf61", "calibration: dtype is 'bf61'; use fp32, bf16, fp16 (did you mean 'bf16'?), or null"),
        (("device",), 3, "calibration: device is 3; use text"),
        (("pas_s",), 1, "calibration: unknown key 'pas_s'; did you mean 'pass_s'?"),
        (("fabrics", 0, "parts", 0, "part"), "layr", "calibration.fabrics[0].parts[0]: part is 'layr'; use layer"),
        (
            ("fabrics", 0, "parts", 0, "tokens"),
            100,
            "fabrics[0].parts[0]: 100 tokens are not a multiple of the sequence length",
        ),
        (
            ("fabrics", 0, "parts", 0, "forward_s"),
            1e9,
            "forward_s is 1000000000.0; use a number from 0, up to 10000 (s)",
        ),
        (
            ("fabrics", 0, "links", "ib", "efficiency"),
            -1,
            "fabrics[0].links.ib: efficiency is -1; use a number above 0",
        ),
        (("fabrics", 0, "gpo"), "h100", "calibration.fabrics[0]: unknown key 'gpo'; did you mean 'gpu'?"),
        (("fabrics",), 3, "calibration: fabrics is 3; use a list"),
        (("between", 0, "gbps"), -9, "gbps is -9; use a number above 0 (Gb/s), or null"),
        (("betwen",), [], "calibration: unknown key 'betwen'; did you mean 'between'?"),
    ],
)
def test_a_wrong_value_of_a_calibration_is_named(at: tuple[Any, ...], value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(HolmesError) as refused:
        costs(changed(CALIBRATION if at[0] in ("fabrics", "between", "betwen") else OLDER, at, value), tmp_path)
    line = str(refused.value)
    assert says in line and line.startswith(f"{tmp_path / 'cal.yaml'}: ") and refused.value.exit_code == 2


def test_any_wrong_value_of_a_calibration_gives_one_line() -> None:
    for data, at in [(document, at) for document in (CALIBRATION, OLDER) for at in places(document)]:
        for value in WRONG:
            try:
                Calibration.from_dict(changed(data, at, value))
            except HolmesError as e:
                assert "\n" not in str(e) and e.hint and len(str(e)) < 400, (at, value)


def test_a_plan_and_a_site_file_in_each_others_place_are_named(tmp_path: Path) -> None:
    plan_file, site_file = tmp_path / "plan.yaml", tmp_path / "site.yaml"
    plan_file.write_text("stages: []\n")
    site_file.write_text("fabrics: []\n")
    for read, path, message in (
        (Plan.read, site_file, f"a site file, not a plan; plan with it first: `holmes plan --site {site_file}`"),
        (read_site_file, plan_file, f"a plan, not a site file; a plan contains its site: give plan_file={plan_file}"),
        (lambda path: load([str(path)]), site_file, f"a site file, not KEY=VALUE; write site_file={site_file}"),
        (lambda path: load([str(path)]), plan_file, f"a plan, not KEY=VALUE; write plan_file={plan_file}"),
    ):
        with pytest.raises(HolmesError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: {message}"
