import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import node, node_line, partition_line

from holmes_hpc.slurm.scontrol import (
    Gres,
    minutes,
    parse_config,
    parse_gres,
    parse_node,
    parse_partition,
    parse_record,
    parse_states,
)


def test_a_node_is_read_whole_in_both_releases() -> None:
    for release in ("22.05.8", "24.11.5"):
        n = node("ib1", "nic_ib,nic_0.4g", "ib,all", gres="gpu:a100:4(S:0-1)", release=release)
        assert (n.name, n.partitions, n.features) == ("ib1", ("ib", "all"), ("nic_ib", "nic_0.4g"))
        assert (n.cpus, n.memory_mib) == (8, 16384)
        assert n.usable and n.gpus == 4 and n.gpu_types == ("a100",)


def test_free_text_of_a_reason_cannot_pose_as_another_key() -> None:
    n = node("n1", "nic_ib", state="IDLE+DRAIN", reason="bad NIC State=IDLE Gres=gpu:9 AvailableFeatures=nic_roce")
    assert n.features == ("nic_ib",) and n.gpus == 0 and not n.usable
    assert "bad NIC" in n.reason


def test_values_with_spaces_stay_whole() -> None:
    assert parse_record(node_line("n1"))["OS"].startswith("Linux 6.1.0-18-amd64 #1 SMP")


def test_states() -> None:
    assert parse_states("IDLE*+DRAIN") == ("IDLE", "NOT_RESPONDING", "DRAIN")
    usable = {
        "IDLE": True,
        "MIXED+PLANNED": True,
        "ALLOCATED": True,
        "IDLE+CLOUD+POWERED_DOWN": True,
        "DOWN": False,
        "IDLE+DRAIN": False,
        "MIXED*": False,
        "DOWN*+DRAIN": False,
        "IDLE+MAINT": False,
        "IDLE+CLOUD+MAINTENANCE+RESERVED": False,
        "IDLE+BLOCKED": False,
        "IDLE+DYNAMIC_FUTURE": False,
        "FUTURE": False,
    }
    for state, expected in usable.items():
        assert node("n1", state=state).usable is expected, state


def test_gres() -> None:
    assert parse_gres("gpu:a100:4(S:0-1),shard:a100:16(S:0,1)") == (Gres("gpu", "a100", 4), Gres("shard", "a100", 16))
    assert parse_gres("gpu:8") == (Gres("gpu", "", 8),)
    assert parse_gres("gpu") == (Gres("gpu", "", 1),)
    assert parse_gres("gpu:a100_1g.5gb:7,gpu:a100:3") == (Gres("gpu", "a100_1g.5gb", 7), Gres("gpu", "a100", 3))
    assert parse_gres("") == ()


def test_active_features_count_not_the_available_ones() -> None:
    n = parse_node(node_line("n1", "nic_ib,knl_flat", active="nic_ib"))
    assert n.features == ("nic_ib",) and n.available == ("nic_ib", "knl_flat")
    assert parse_node(node_line("n1", "nic_ib,knl_flat", active="(null)")).features == ()


def test_partition() -> None:
    p = parse_partition(partition_line("gpu", "ib[1-2],r5", default=True, priority=10))
    assert p.nodes == ("ib1", "ib2", "r5") and p.default and p.up and p.priority == 10
    assert not parse_partition(partition_line("gpu", "(null)", state="DRAIN")).up
    assert parse_partition(partition_line("gpu", "(null)")).nodes == ()


def test_a_name_that_contains_all_or_none_stays_whole() -> None:
    line = "PartitionName=gpu AllowGroups=ALLSTAFF,PHYSALL AllowAccounts=ALL DenyAccounts=NONEXIST AllowQos=SMALL"
    p = parse_partition(line)
    assert p.allow_groups == ("ALLSTAFF", "PHYSALL") and p.allow_accounts == ()
    assert p.deny_accounts == ("NONEXIST",) and p.allow_qos == ("SMALL",)


def test_config() -> None:
    config = parse_config(
        "Configuration data as of 2024-05-01T10:00:00\nClusterName             = holmes\n"
        "SLURM_VERSION           = 22.05.8\n"
        "SchedulerParameters     = bf_interval=1,disable_hetjob_steps\n"
        "NodeFeaturesPlugins     = (null)\n\nSlurmctld(primary) at m is UP\n"
    )
    assert config.cluster == "holmes" and config.version == (22, 5)
    assert config.options("SchedulerParameters") == ("bf_interval=1", "disable_hetjob_steps")
    assert config.options("NodeFeaturesPlugins") == ()


@given(st.text(max_size=80))
def test_any_feature_text_is_data(text: str) -> None:
    text = "".join(c for c in text if c.isprintable() and c not in " ,=")
    n = node("n1", text)
    assert n.name == "n1" and n.features in ((text,), ())


@pytest.mark.parametrize(
    "text, found",
    [
        (90, 90),
        ("90", 90),
        ("5:30", 5.5),
        ("1:30:00", 90),
        ("1-12", 2160),
        ("1-00:30", 1470),
        ("2-01:00:30", 2940.5),
        ("infinite", None),
        ("UNLIMITED", None),
        ("n/a", None),
        ("", None),
        ("1-", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: object, found: float | None) -> None:
    assert minutes(text) == found
