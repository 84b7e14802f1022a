from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import topology
from holmes_hpc.testbed.topology import FOLDER, FabricSpec, Topology, format_rate, parse, read

GOOD = """
name: small
ethernet_mbit: 50
fabrics:
  - {name: ib-a, nic: ib, partition: ib, nodes: 2, rdma_mbit: 400}
  - {name: eth-a, nic: ethernet, partition: eth, nodes: 1}
"""


def edited(*path: object, value: object) -> str:
    """Return GOOD with one value replaced."""
    data = yaml.safe_load(GOOD)
    section = data
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return yaml.safe_dump(data)


def test_default_topology_is_four_ib_four_roce_two_ethernet() -> None:
    layout = read(None)
    counts = {f.partition: (f.nic, f.nodes, f.rdma_mbit) for f in layout.fabrics}
    assert counts == {"ib": ("ib", 4, 400), "roce": ("roce", 4, 250), "eth": ("ethernet", 2, None)}
    assert layout.ethernet_mbit == 50
    assert [n.name for n in layout.nodes] == [
        "ib1",
        "ib2",
        "ib3",
        "ib4",
        "roce1",
        "roce2",
        "roce3",
        "roce4",
        "eth1",
        "eth2",
    ]


def test_evaluation_has_28_nodes_in_four_fabrics() -> None:
    fabrics = [(f.nic, f.nodes) for f in read("evaluation").fabrics]
    assert fabrics == [("ib", 8), ("roce", 8), ("ethernet", 8), ("ib", 4)]


def test_two_ib_fabrics_have_separate_partitions_and_features() -> None:
    layout = read("two-ib")
    assert len({f.partition for f in layout.fabrics}) == 2
    assert len({layout.features(f) for f in layout.fabrics}) == 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_topology_file_is_named_after_itself(path: object) -> None:
    assert read(path).name == path.stem  # type: ignore[attr-defined,arg-type]


def test_several_ranks_per_node_add_a_feature() -> None:
    layout = parse(edited("fabrics", 0, "ranks", value=2), "good")
    assert [layout.features(f)[4:] for f in layout.fabrics] == [("ranks_2",), ()]


def test_features_of_both_kinds_of_node() -> None:
    layout = parse(GOOD, "good")
    assert layout.features(layout.fabrics[0]) == ("nic_ib", "nic_0.4g", "eth_0.05g", "fabric_ib-a")
    assert layout.features(layout.fabrics[1]) == ("nic_ethernet", "nic_0.05g", "eth_0.05g", "fabric_eth-a")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no keys with values"),
        ("fabrics: [", "not YAML"),
        ("fabrics: 3\nname: x\nethernet_mbit: 5", "fabrics is 3"),
        ("name: x\nethernet_mbit: 5\nfabrics: []", "no fabric"),
        ("ethernet_mbit: 5\nfabrics: [{name: a, nic: ib, partition: a, nodes: 1, rdma_mbit: 1}]", "name is missing"),
        (edited("fabrics", 0, "nic", value="ibb"), "nic is 'ibb'; use ib, roce, ethernet (did you mean 'ib'?)"),
        (edited("fabrics", 0, "nodes", value=0), "nodes is 0"),
        (edited("fabrics", 0, "nodes", value=True), "nodes is True"),
        (edited("fabrics", 0, "nodes", value=500), "at most 200"),
        (edited("fabrics", 0, "nodes", value="two"), "nodes is 'two'"),
        (edited("fabrics", 0, "rdma_mbit", value=-1), "rdma_mbit is -1"),
        (edited("fabrics", 0, "rdma_mbit", value=float("nan")), "rdma_mbit is nan"),
        (edited("fabrics", 1, "rdma_mbit", value=400), "Ethernet-only fabric has rdma_mbit"),
        (edited("fabrics", 1, "name", value="ib-a"), "two fabrics are named 'ib-a'"),
        (edited("fabrics", 1, "prefix", value="ib"), "two nodes are named 'ib1'"),
        (edited("fabrics", 0, "name", value="a b"), "name is 'a b'"),
        (edited("fabrics", 0, "partition", value="ib;reboot"), "partition is 'ib;reboot'"),
        (edited("fabrics", 0, "prefix", value="toolong"), "prefix is 'toolong'"),
        (edited("fabrics", 0, "rate", value=3), "unknown key 'rate'"),
        (edited("fabrics", 0, value="ib"), "is 'ib', not keys with values"),
        (edited("ethernet_mbits", value=3), "did you mean 'ethernet_mbit'"),
        (edited("partitions", value=[{"name": "low", "fabrics": ["ib-b"]}]), "did you mean 'ib-a'"),
        (edited("partitions", value=[{"name": "low", "fabrics": []}]), "names the fabric ''"),
        (edited("partitions", value=[{"name": "ib", "fabrics": ["ib-a"]}]), "two partitions are named 'ib'"),
        (edited("partitions", value=[{"name": "low", "fabrics": ["ib-a"], "preempt": "kill"}]), "preempt is 'kill'"),
        (edited("slurm", value={"SlurmctldPort": 6817}), "is set by the testbed"),
        (edited("slurm", value={"slurmctldport": 6817}), "is set by the testbed"),
        (edited("slurm", value={"KillWait": "5\nNodeName=x"}), "slurm.KillWait"),
        (edited("slurm", value={"Kill Wait": 5}), "not a setting"),
        (edited("slurm", value=[1]), "slurm is [1]; use keys with values"),
    ],
)
def test_bad_input_is_one_line_with_file_and_hint(text: str, problem: str) -> None:
    with pytest.raises(TestbedError) as caught:
        parse(text, "some.yaml")
    message = str(caught.value)
    assert problem in message
    assert message.startswith("some.yaml: ") and "\n" not in message and "; " in message
    assert caught.value.exit_code == 2


def test_missing_file_suggests_a_similar_name() -> None:
    with pytest.raises(TestbedError, match="did you mean 'evaluation'"):
        read("evaluatoin")


def test_binary_file_is_refused(tmp_path: object) -> None:
    path = tmp_path / "x.yaml"  # type: ignore[operator]
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TestbedError, match="cannot be read"):
        read(path)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "nic", "nodes", "fabrics", "partition", "slurm", "rdma_mbit"])
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(json_like)
def test_parse_returns_a_topology_or_raises_testbed_error(data: object) -> None:
    try:
        parse(yaml.safe_dump(data, allow_unicode=True), "x.yaml")
    except TestbedError as error:
        assert "\n" not in str(error)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text, "x.yaml")
    except TestbedError as error:
        assert "\n" not in str(error)


@given(st.integers(1, 999_999))
def test_rate_in_a_feature_has_no_rounding_error(mbit: int) -> None:
    text = format_rate(mbit)
    assert text.endswith("g") and round(float(text[:-1]) * 1000) == mbit


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_nodes_are_numbered_once_and_in_fabric_order(sizes: list[int]) -> None:
    fabrics = tuple(
        FabricSpec(f"f{i}", "ib", f"p{i}", count, prefix="abcd"[i], rdma_mbit=1) for i, count in enumerate(sizes)
    )
    layout = Topology("t", 1, fabrics)
    assert [n.index for n in layout.nodes] == list(range(sum(sizes)))
    assert [n.fabric_index for n in layout.nodes] == sorted(n.fabric_index for n in layout.nodes)
    assert len(layout.nodes) <= topology.MAX_NODES
