from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_features, read_vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import NicNames

IB, ROCE, ETHERNET = NicType.IB, NicType.ROCE, NicType.ETHERNET


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOLMES_FEATURES", raising=False)
    return read_vocabulary()


@pytest.mark.parametrize(
    ("features", "nic", "rdma", "ethernet"),
    [
        ("nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a", IB, 0.4, 0.05),
        ("nic_roce,nic_200g", ROCE, 200, None),
        ("nic_ethernet,nic_25g", ETHERNET, None, 25),
        ("ib", IB, None, None),
        ("IB", IB, None, None),
        ("ib_hdr", IB, 200, None),
        ("ib_qdr", IB, 40, None),
        ("hdr-100", IB, 100, None),
        ("ib4", IB, None, None),
        ("mlx5_ib", IB, None, None),
        ("ib-i4l1s19", IB, None, None),
        ("ss11", ETHERNET, None, None),
        ("IB:EDR,10g", IB, 100, 10),
        ("ibfdr", IB, 56, None),
        ("hdr100", IB, 100, None),
        ("hdr200", IB, 200, None),
        ("infiniband,25gbe", IB, None, 25),
        ("10g", ETHERNET, None, 10),
        ("roce,100g", ROCE, 100, 100),
        ("roce_v2", ROCE, None, None),
        ("omnipath", ETHERNET, None, None),
        ("eth,ib", IB, None, None),
    ],
)
def test_what_sites_write(vocabulary, features: str, nic: NicType, rdma: float | None, ethernet: float | None) -> None:
    reading = read_features(features.split(","), vocabulary)
    assert (reading.nic, reading.rdma_gbps, reading.ethernet_gbps) == (nic, rdma, ethernet)
    assert not reading.unknown and not reading.problems


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvidia_a100_80gb_pcie", "a100-pcie-80gb"),
        ("nvidia_a100-pcie-40gb", "a100-pcie-40gb"),
        ("a100l", "a100-80gb"),
        ("gpua100", "a100-40gb"),
        ("rtx_a1000", None),
        ("quadro_p1000", None),
        ("GPU_SKU:V100_SXM2", "v100-16gb"),
        ("gpuv100x", "v100-32gb"),
        ("tesla_v100-sxm2-32gb", "v100-32gb"),
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("h100sxm", "h100"),
        ("nvidia_h100_pcie", "h100-pcie"),
        ("nvidia_gh200_480gb", "gh200"),
        ("h200", "h200"),
        ("h20", "h20"),
        ("A800", "a800"),
        ("h800", "h800"),
        ("b300", "b300"),
        ("gb200", "gb200"),
        ("quadro_rtx_8000", "rtx-8000"),
        ("rtx_6000", "rtx-6000"),
        ("rtx_6000_ada_generation", "rtx-6000-ada"),
        ("rtxproserver6000", "rtx-pro-6000"),
        ("mi210", "mi210"),
        ("mi300a", "mi300a"),
        ("amd_mi300x", "mi300x"),
        ("l40s", "l40s"),
        ("tesla_t4", "t4"),
        ("a10g", None),
        ("gen", None),
    ],
)
def test_names_of_gpus_on_real_sites(vocabulary, name: str, kind: str | None) -> None:
    gpu = vocabulary.gpu(name)
    assert (gpu.name if gpu else None) == kind


def test_features_name_nics(vocabulary) -> None:
    reading = read_features(["nic_ib", "nic_if_bond0", "nic_hca_mlx5_0", "nic_hca_mlx5_1:2", "eth_25g"], vocabulary)
    assert reading.names == NicNames("bond0", ("mlx5_0", "mlx5_1:2")) and reading.ethernet_gbps == 25
    assert not reading.unknown and not reading.problems
    assert "sockets over bond0" in [m.text for m in reading.meanings]
    two = read_features(["nic_ib", "nic_if_bond0", "nic_if_eno1"], vocabulary)
    assert two.names.ethernet == "bond0" and "2 interfaces" in two.problems[0]


def test_a_sites_own_file_names_nics_and_networks(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("""\
features:
  - {match: 'island(?P<fabric>[a-z])', interface: bond0, hca: [mlx5_0, mlx5_1], storage: ['fec0:0:0:1::/64']}
  - {match: efa, nic: efa}
networks: {ib: IBext_v11}
""")
    own = read_vocabulary(tmp_path / "own.yaml")
    assert read_features(["islandb"], own).names == NicNames("bond0", ("mlx5_0", "mlx5_1"), ("fec0:0:0:1::/64",))
    assert read_features(["efa"], own).nic is NicType.EFA and own.networks == {"ib": "IBext_v11"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "networks: {infiniband: IBext}",
            "{'infiniband': 'IBext'} is not a map of NIC types to network names; write {ib: ",
        ),
        ("networks: [ib]", "['ib'] is not a map of NIC types"),
        ("networks: {ib: 7}", "{'ib': 7} is not a map of NIC types"),
        ("features: [{match: x, storage: 10.0.0.0/77}]", "storage: '10.0.0.0/77' is not a network"),
    ],
)
def test_what_cannot_be_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(SiteError) as e:
        read_vocabulary(tmp_path / "own.yaml")
    assert says in str(e.value)


def test_two_nic_types_are_a_problem_not_a_choice(vocabulary) -> None:
    for features in (["ib", "roce"], ["nic_ib", "nic_roce"]):
        reading = read_features(features, vocabulary)
        assert reading.nic is None
        assert "2 NIC types" in reading.problems[0] and features[0] in reading.problems[0]


def test_own_label_wins_aloud(vocabulary) -> None:
    reading = read_features(["nic_ib", "roce"], vocabulary)
    assert reading.nic is IB and any("wins over roce" in s for s in reading.assumptions)


def test_nothing_named_is_said(vocabulary) -> None:
    assert "no feature names a NIC" in read_features([], vocabulary).assumptions[0]
    assert "Omni-Path" in read_features(["omnipath"], vocabulary).assumptions[0]
    assert "one port" in read_features(["ib_hdr"], vocabulary).assumptions[0]


def test_two_fabrics_and_two_rates_are_problems(vocabulary) -> None:
    reading = read_features(["nic_ib", "fabric_a", "fabric_b", "nic_100g", "nic_200g"], vocabulary)
    assert reading.fabric is None and reading.rdma_gbps == 100
    assert len(reading.problems) == 2


def test_unknown_features_are_listed_and_others_passed_over(vocabulary) -> None:
    reading = read_features(["nic_ib", "intel", "frobnicator", "128g", "a100"], vocabulary)
    assert reading.unknown == ("frobnicator", "128g")
    assert [m.gpu for m in reading.meanings if m.gpu] == ["a100-40gb"]


def test_the_sites_own_file_comes_first(vocabulary, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "features:\n  - {match: 'island(?P<fabric>\\d+)', nic: ib, port: fast}\n"
        "  - {match: 'ib', nic: roce}\n"
        "rates: {fast: 300}\nignored: ['frob.*']\n"
    )
    reading = read_features(["island7", "frobnicator"], read_vocabulary(own))
    assert (reading.nic, reading.fabric, reading.rdma_gbps, reading.unknown) == (IB, "7", 300, ())
    assert read_features(["ib"], read_vocabulary(own)).nic is ROCE
    assert read_features(["ib"], vocabulary).nic is IB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("featurs: []", "did you mean 'features'"),
        ("features: [{match: '(', nic: ib}]", "not a regular expression"),
        ("features: [{match: x, nic: token-ring}]", "choose one of: efa, ethernet, ib, omnipath, roce"),
        ("features: [{match: '(?P<speed>x)'}]", "unknown group 'speed'"),
        ("features: [{nic: ib}]", "lacks 'match'"),
        ("features: {a: b}", "not a list"),
        ("rates: {a: fast}", "not a map of names to rates"),
        ("gpus: [{match: x, name: y}]", "is not a GPU"),
        ("a: [", "not YAML"),
        ("- 3", "not a mapping of features"),
    ],
)
def test_a_bad_vocabulary_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(SiteError) as error:
        read_vocabulary(own)
    assert says in str(error.value) and "own.yaml" in str(error.value) and "\n" not in str(error.value)


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_features_are_read(features: list[str]) -> None:
    reading = read_features(features, read_vocabulary())
    explained = {m.feature for m in reading.meanings}
    assert explained | set(reading.unknown) == set(features)


def test_what_the_snippets_show_is_understood(vocabulary) -> None:
    slurm = Path(__file__).parents[2] / "slurm"
    lines = [line for line in (slurm / "features.conf.snippet").read_text().splitlines() if line.startswith("NodeName")]
    assert len(lines) == 3
    for line in lines:
        reading = read_features(line.split("Feature=")[1].split(","), vocabulary)
        assert reading.fabric and reading.ethernet_gbps
        assert not (reading.unknown or reading.problems or reading.assumptions)
    own = read_vocabulary(slurm / "features.site.yaml")
    assert read_features(["island3", "fast-ib-800", "owner_physics"], own).fabric == "3"
    assert read_features(["fast-roce-100"], own).rdma_gbps == 100 and own.gpu("warp9") is not None


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/nics.md").read_text()
    (tmp_path / "own.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    reading = read_features(["rail400x8", "islandb", "rack12", "water_cooled"], read_vocabulary(tmp_path / "own.yaml"))
    assert (reading.nic, reading.rdma_gbps, reading.fabric, reading.unknown) == (IB, 400, "b", ())
