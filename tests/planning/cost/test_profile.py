"""Third-party layer profiles in place of a calibration."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sites import A100, H100, one_fabric

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.profile import from_csv, from_sailor

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from published_runs import has_profile, predicted_s, read

pytestmark = pytest.mark.integration

MODEL, BATCH = named("gpt_3_6b"), Batch(64, 2, 2048)
CSV = """part,tp,micro_size,sequence,forward_s,backward_s,update_s,gpu,hidden
layer,1,1,2048,0.010,0.020,0.001,a100-80gb,3072
layer,1,2,2048,0.019,0.040,0.001,a100-80gb,3072
head,1,2,2048,0.005,0.010,,a100-80gb,3072
layer,1,2,2048,0.008,0.016,,h100-80gb,
"""


def sailor_profile(layers: int = MODEL.layers) -> dict[str, object]:
    def parts(seconds: float) -> dict[str, list[float]]:
        return {
            "0": [0.001, 1e-6, 5e-4],
            **{str(i + 1): [seconds, 2 * seconds, 1e-3] for i in range(layers)},
            str(layers + 1): [0.004, 0.006, 5e-4],
        }

    return {"2": {"1": parts(0.02), "4": parts(0.007)}, "4": {"1": parts(0.038)}}


def test_csv_times_apply_to_the_gpu_kinds_that_it_names() -> None:
    costs = Costs(from_csv(CSV, MODEL, BATCH))
    a100, h100 = one_fabric(A100), one_fabric(H100)
    assert costs.layer_s(MODEL, BATCH, 1, a100) == pytest.approx((0.019, 0.040))
    assert costs.layer_s(MODEL, BATCH, 1, h100) == pytest.approx((0.008, 0.016))
    assert costs.part_s("head", MODEL, BATCH, 1, a100) == pytest.approx((0.005, 0.010))
    assert costs.part_s("head", MODEL, BATCH, 1, h100) == Costs().part_s("head", MODEL, BATCH, 1, h100)
    assert costs.optimizer_s(layer_parameters(MODEL), a100) == pytest.approx(0.001)


def test_sailor_times_are_used() -> None:
    costs, fabric = Costs(from_sailor(sailor_profile(), MODEL, BATCH)), one_fabric(A100)
    assert costs.layer_s(MODEL, BATCH, 1, fabric) == pytest.approx((0.02, 0.04))
    assert costs.layer_s(MODEL, BATCH, 4, fabric) == pytest.approx((0.007, 0.014))
    assert costs.part_s("head", MODEL, BATCH, 1, fabric) == pytest.approx((0.004, 0.006))
    between = costs.layer_s(MODEL, replace(BATCH, micro_size=3), 1, fabric)[0]
    assert 0.02 < between < 0.038


def test_a_smaller_micro_batch_takes_no_longer_than_a_larger_one() -> None:
    noisy = CSV.replace("layer,1,1,2048,0.010", "layer,1,1,2048,0.030")
    seconds = Costs(from_csv(noisy, MODEL, BATCH)).layer_s(MODEL, replace(BATCH, micro_size=1), 1, one_fabric(A100))
    assert seconds == pytest.approx((0.019, 0.020))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden\n", "widht\n", "unknown column 'widht'"),
        ("part,tp,", "part,", "no column tp; give at least part, tp, micro_size, forward_s, backward_s"),
        ("layer,1,1,2048", "layr,1,1,2048", "line 2: part is 'layr'; use layer, embedding, head"),
        ("0.010,0.020", "fast,0.020", "line 2: forward_s is 'fast'; use a number"),
        ("0.010,0.020", "-1,0.020", "line 2: forward_s is -1.0; use a number from 0"),
        ("0.010,0.020", "0.010", "line 2: the number of values differs from the number of columns"),
        ("0.010,0.020", ",0.020", "line 2: a value is missing"),
        (",3072\nlayer,1,2", ",1024\nlayer,1,2", "profile has hidden=1024, gpt_3_6b has hidden=3072"),
    ],
)
def test_errors_in_a_csv_name_file_and_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "layers.csv"
    path.write_text(CSV.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        request.costs(load(["model=gpt_3_6b", f"calibration={path}"]))
    assert message in str(refused.value) and str(refused.value).startswith(f"{path}: profile") and refused.value.hint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sailor_profile(12), "profile has 12 layers, gpt_3_6b has 30"),
        ({"1": 3}, "not Sailor's profile"),
        ({"1": {"1": {"0": [1, 2]}}}, "not Sailor's profile"),
        ({"1": {"1": {"0": "x"}}}, "not Sailor's profile"),
        ({"1": {}}, "no rows"),
    ],
)
def test_other_json_profiles_are_refused(tmp_path: Path, data: object, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        request.costs(load(["model=gpt_3_6b", f"calibration={path}"]))
    path.write_text(json.dumps(sailor_profile()))
    assert request.costs(load(["model=gpt_3_6b", f"calibration={path}"])).calibration.fabrics


def test_runs_are_predicted_by_their_layer_profile() -> None:
    """Predict OPT-350 on GH200 with micro-batches of 8, whose profile is precise.
    benchmarks/published_table.py has the other rows."""
    runs = [r for r in read(["sailor"]) if has_profile(r) and r.micro_size == 8]
    errors = [predicted_s(r, profile=True) / (r.seconds or 1) - 1 for r in runs]
    assert len(runs) == 9 and np.abs(errors).mean() < 0.1
