import pytest

from holmes_hpc.fabric.software import CUDA, check_software, software

GOOD = {"python": "3.11.7", "holmes-hpc": "0.1.0", "torch": "2.13.0", "megatron-core": "0.16.1", CUDA: "13.0"}


def without(name: str) -> dict[str, str]:
    return {k: v for k, v in GOOD.items() if k != name}


def test_alike_is_no_line_and_a_login_node_needs_no_torch() -> None:
    light = {k: GOOD[k] for k in ("python", "holmes-hpc")}
    assert list(check_software({"a1": GOOD, "a2": GOOD}, light, ["a1", "a2"])) == []


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (without("torch"), "error: nodes a3: their Python has no torch; pip install 'holmes-hpc[train]'"),
        (without(CUDA), "error: nodes a3: have GPUs, but a torch built without CUDA"),
        ({**GOOD, "torch": "2.6.0"}, "warning: nodes a3: torch 2.6.0, where others have 2.13.0"),
        ({**GOOD, "python": "3.12.1"}, "warning: nodes a3: python 3.12.1, where this machine has 3.11.7"),
        (
            {**GOOD, "transformer-engine": "2.9"},
            "warning: nodes a[1-2]: transformer-engine none, where others have 2.9",
        ),
    ],
)
def test_what_differs_is_said_of_the_nodes_that_differ(odd: dict[str, str], says: str) -> None:
    found = list(check_software({"a1": GOOD, "a2": GOOD, "a3": odd}, {"python": "3.11.7"}, ["a3"]))
    assert any(str(f).startswith(says) for f in found), [str(f) for f in found]


def test_this_python_is_read_without_importing_torch() -> None:
    found = software()
    assert {"python", "holmes-hpc", "numpy"} <= found.keys()
