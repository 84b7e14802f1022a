from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import topology
from holmes_hpc.testbed.topology import FOLDER, FabricSpec, Topology, parse, rate, read

GOOD = """
name: small
ethernet_mbit: 50
fabrics:
  - {name: ib-a, nic: ib, partition: ib, nodes: 2, rdma_mbit: 400}
  - {name: eth-a, nic: ethernet, partition: eth, nodes: 1}
"""


def changed(*path: object, to: object) -> str:
    """GOOD with one value replaced."""
    data = yaml.safe_load(GOOD)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return yaml.safe_dump(data)


def test_default_topology_is_four_ib_four_roce_two_ethernet() -> None:
    shape = read(None)
    counts = {f.partition: (f.nic, f.nodes, f.rdma_mbit) for f in shape.fabrics}
    assert counts == {"ib": ("ib", 4, 400), "roce": ("roce", 4, 250), "eth": ("ethernet", 2, None)}
    assert shape.ethernet_mbit == 50
    assert [n.name for n in shape.nodes] == [
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
    found = [(f.nic, f.nodes) for f in read("evaluation").fabrics]
    assert found == [("ib", 8), ("roce", 8), ("ethernet", 8), ("ib", 4)]


def test_two_ib_fabrics_have_partitions_and_features_of_their_own() -> None:
    shape = read("two-ib")
    assert len({f.partition for f in shape.fabrics}) == 2
    assert len({shape.features(f) for f in shape.fabrics}) == 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_topology_file_is_named_after_itself(path: object) -> None:
    assert read(path).name == path.stem  # type: ignore[attr-defined,arg-type]


def test_a_fabric_whose_nodes_hold_more_ranks_has_a_feature_that_says_so() -> None:
    found = parse(changed("fabrics", 0, "ranks", to=2), "good")
    assert [found.features(f)[4:] for f in found.fabrics] == [("ranks_2",), ()]


def test_features_of_both_kinds_of_node() -> None:
    shape = parse(GOOD, "good")
    assert shape.features(shape.fabrics[0]) == ("nic_ib", "nic_0.4g", "eth_0.05g", "fabric_ib-a")
    assert shape.features(shape.fabrics[1]) == ("nic_ethernet", "nic_0.05g", "eth_0.05g", "fabric_eth-a")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a map"),
        ("fabrics: [", "not YAML"),
        ("fabrics: 3\nname: x\nethernet_mbit: 5", "fabrics is 3"),
        ("name: x\nethernet_mbit: 5\nfabrics: []", "no fabric"),
        ("ethernet_mbit: 5\nfabrics: [{name: a, nic: ib, partition: a, nodes: 1, rdma_mbit: 1}]", "name is missing"),
        (changed("fabrics", 0, "nic", to="ibb"), "nic is 'ibb'; use ib, roce, ethernet (did you mean 'ib'?)"),
        (changed("fabrics", 0, "nodes", to=0), "nodes is 0"),
        (changed("fabrics", 0, "nodes", to=True), "nodes is True"),
        (changed("fabrics", 0, "nodes", to=500), "at most 200"),
        (changed("fabrics", 0, "nodes", to="two"), "nodes is 'two'"),
        (changed("fabrics", 0, "rdma_mbit", to=-1), "rdma_mbit is -1"),
        (changed("fabrics", 0, "rdma_mbit", to=float("nan")), "rdma_mbit is nan"),
        (changed("fabrics", 1, "rdma_mbit", to=400), "Ethernet-only fabric has rdma_mbit"),
        (changed("fabrics", 1, "name", to="ib-a"), "two fabrics are named 'ib-a'"),
        (changed("fabrics", 1, "prefix", to="ib"), "two nodes are named 'ib1'"),
        (changed("fabrics", 0, "name", to="a b"), "name is 'a b'"),
        (changed("fabrics", 0, "partition", to="ib;reboot"), "partition is 'ib;reboot'"),
        (changed("fabrics", 0, "prefix", to="toolong"), "prefix is 'toolong'"),
        (changed("fabrics", 0, "rate", to=3), "unknown key 'rate'"),
        (changed("fabrics", 0, to="ib"), "is 'ib', not keys with values"),
        (changed("ethernet_mbits", to=3), "did you mean 'ethernet_mbit'"),
        (changed("partitions", to=[{"name": "low", "fabrics": ["ib-b"]}]), "did you mean 'ib-a'"),
        (changed("partitions", to=[{"name": "low", "fabrics": []}]), "names the fabric ''"),
        (changed("partitions", to=[{"name": "ib", "fabrics": ["ib-a"]}]), "two partitions are named 'ib'"),
        (changed("partitions", to=[{"name": "low", "fabrics": ["ib-a"], "preempt": "kill"}]), "preempt is 'kill'"),
        (changed("slurm", to={"SlurmctldPort": 6817}), "is the testbed's own"),
        (changed("slurm", to={"slurmctldport": 6817}), "is the testbed's own"),
        (changed("slurm", to={"KillWait": "5\nNodeName=x"}), "slurm.KillWait"),
        (changed("slurm", to={"Kill Wait": 5}), "not a setting"),
        (changed("slurm", to=[1]), "slurm is [1]; use keys with values"),
    ],
)
def test_bad_input_is_one_line_with_the_file_and_the_cure(text: str, says: str) -> None:
    with pytest.raises(TestbedError) as caught:
        parse(text, "some.yaml")
    message = str(caught.value)
    assert says in message
    assert message.startswith("some.yaml: ") and "\n" not in message and "; " in message
    assert caught.value.exit_code == 2


def test_a_missing_file_names_the_nearest() -> None:
    with pytest.raises(TestbedError, match="did you mean 'evaluation'"):
        read("evaluatoin")


def test_a_binary_file_is_refused(tmp_path: object) -> None:
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
def test_whatever_the_yaml_says_parse_answers_or_raises_its_own_error(data: object) -> None:
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
def test_a_rate_in_a_feature_reads_back_as_the_rate(mbit: int) -> None:
    text = rate(mbit)
    assert text.endswith("g") and round(float(text[:-1]) * 1000) == mbit


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_nodes_are_numbered_once_and_in_fabric_order(sizes: list[int]) -> None:
    fabrics = tuple(
        FabricSpec(f"f{i}", "ib", f"p{i}", count, prefix="abcd"[i], rdma_mbit=1) for i, count in enumerate(sizes)
    )
    shape = Topology("t", 1, fabrics)
    assert [n.index for n in shape.nodes] == list(range(sum(sizes)))
    assert [n.fabric_index for n in shape.nodes] == sorted(n.fabric_index for n in shape.nodes)
    assert len(shape.nodes) <= topology.MAX_NODES
