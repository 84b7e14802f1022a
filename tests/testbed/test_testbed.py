"""A real testbed of this module's own, beside the session's: what it shows, how it breaks, what it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holmes_hpc import testbed as beds
from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import network, processes, userland
from holmes_hpc.testbed.commands import SYSTEM_PATH
from holmes_hpc.testbed.record import FILE, Record

pytestmark = pytest.mark.slurm
PEER = Path(__file__).parents[1] / "support" / "peer.py"
UP = "from holmes_hpc import testbed; testbed.up('default')"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A state directory of this module's own; whatever happens, nothing stays in it."""
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(os.path.realpath(folder)) / "bed"
        patch.setenv("HOLMES_TESTBED", str(path))
        patch.setenv("SLURM_CONF", str(path / "etc" / "slurm.conf"))
        yield path
        beds.down()


@pytest.fixture
def bed(place: Path) -> Path:
    """The testbed in that directory, up and whole."""
    beds.up("default")
    return place


def traces(place: Path, prefix: str) -> list[str]:
    """All that is left of a testbed on this machine."""
    left = [name for name in network.names_in_use() if name.startswith(prefix)]
    left += [f"{found.program} {found.pid}" for found in processes.find(place, ())]
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(place) in line or prefix in line]
    return left + ([str(place)] if place.exists() else [])


def prefix_of(place: Path) -> str:
    record = Record.read(place)
    assert record is not None
    return record.prefix


def slurm(*argv: str, timeout_s: float = 60) -> str:
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd="/tmp",
        env={**os.environ, **beds.env()},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pids(program: str, place: Path) -> list[int]:
    record = Record.read(place)
    assert record is not None
    inodes = {network.inode(name) for name in record.namespaces} - {None}
    return [found.pid for found in processes.find(place, inodes) if found.program == program]  # type: ignore[arg-type]


def test_up_twice_is_the_same_testbed(bed: Path) -> None:
    before = (Record.read(bed), sorted(pids("slurmd", bed)), pids("slurmctld", bed))
    said: list[str] = []
    beds.up("default", progress=said.append)
    assert (Record.read(bed), sorted(pids("slurmd", bed)), pids("slurmctld", bed)) == before
    assert said == []
    assert beds.status()["up"] is True


def test_another_topology_is_refused_while_one_is_up(bed: Path) -> None:
    with pytest.raises(TestbedError, match=r"another one is up \(default.*holmes testbed down"):
        beds.up("two-ib")


def test_slurm_shows_partitions_and_features(bed: Path) -> None:
    rows = {tuple(line.split()) for line in slurm("sinfo", "-h", "-N", "-o", "%R %N %f %T").splitlines()}
    assert len(rows) == 10
    assert ("ib", "ib1", "nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a", "idle") in rows
    assert ("roce", "roce4", "nic_roce,nic_0.25g,eth_0.05g,fabric_roce-a", "idle") in rows
    assert ("eth", "eth2", "nic_ethernet,nic_0.05g,eth_0.05g,fabric_eth-a", "idle") in rows


def test_a_hetjob_step_spans_three_components_and_each_task_sees_its_own_nics(bed: Path) -> None:
    out = bed / "het.out"
    script = bed / "het.sh"
    script.write_text(f"""#!/bin/bash
#SBATCH -p ib -N2 --ntasks-per-node=1 -C nic_ib&nic_0.4g -o {out}
#SBATCH hetjob
#SBATCH -p roce -N2 --ntasks-per-node=1 -C nic_0.25g
#SBATCH hetjob
#SBATCH -p eth -N1 --ntasks-per-node=1 -C nic_0.05g&fabric_eth-a
srun --het-group=0-2 --kill-on-bad-exit=1 sh -c 'echo $SLURM_PROCID $(hostname) $(ls /sys/class/net)'
""")
    slurm("sbatch", "--wait", str(script))
    lines = sorted(out.read_text().splitlines())
    assert lines == [
        "0 ib1 eth0 ib0 lo mgmt0",
        "1 ib2 eth0 ib0 lo mgmt0",
        "2 roce1 eth0 lo mgmt0 roce0",
        "3 roce2 eth0 lo mgmt0 roce0",
        "4 eth1 eth0 lo mgmt0",
    ]


def test_accounting_answers(bed: Path) -> None:
    job = slurm("sbatch", "--parsable", "--wait", "-p", "eth", "-o", "/dev/null", "--wrap", "true").strip()
    for _ in range(100):
        states = slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", "state").split()
        if states == ["COMPLETED"]:
            break
        time.sleep(0.1)
    assert states == ["COMPLETED"]


def test_a_low_partition_made_at_run_time_is_preempted_and_requeued(bed: Path) -> None:
    slurm("scontrol", "create", "PartitionName=low", "Nodes=ib[1-4]", "PriorityTier=1", "PreemptMode=REQUEUE")
    try:
        low = slurm(
            "sbatch", "--parsable", "-p", "low", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300"
        ).strip()
        wait_for(low, "RUNNING")
        slurm("srun", "-p", "ib", "-N4", "--exclusive", "true")
        wait_for(low, "RUNNING")
        assert "Restarts=1" in slurm("scontrol", "show", "job", low)
        slurm("scancel", low)
        wait_for(low, "CANCELLED")
    finally:
        slurm("scontrol", "delete", "PartitionName=low")


def wait_for(job: str, state: str) -> None:
    for _ in range(400):
        found = re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", job))
        if found and found[1] == state:
            return
        time.sleep(0.1)
    pytest.fail(f"job {job} is {found and found[1]}, not {state}")


def address(node: str, interface: str) -> str:
    rows = json.loads(beds.exec_in(node, ["ip", "-j", "addr", "show", interface], capture=True).stdout)
    return str(rows[0]["addr_info"][0]["local"])


def counters(node: str) -> dict[str, tuple[int, int]]:
    """Interface -> bytes sent and received, of a node's data NICs."""
    rows = json.loads(beds.exec_in(node, ["ip", "-j", "-s", "link"], capture=True).stdout)
    return {
        row["ifname"]: (row["stats64"]["tx"]["bytes"], row["stats64"]["rx"]["bytes"])
        for row in rows
        if row["ifname"] not in ("lo", "mgmt0")
    }


def transfer(sender: str, receiver: str, interface: str, count: int) -> float:
    """Send `count` bytes to the receiver's address on `interface`; Mbit/s as the receiver saw it."""
    goal = address(receiver, interface)
    code = "import sys; from holmes_hpc import testbed; sys.exit(testbed.exec_in(sys.argv[1], sys.argv[2:]).returncode)"
    server = subprocess.Popen(
        [sys.executable, "-c", code, receiver, sys.executable, str(PEER), "serve", goal],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        done = beds.exec_in(sender, [sys.executable, str(PEER), "send", goal, port, str(count)], capture=True)
        assert done.returncode == 0, done.stderr
        got, seconds = server.stdout.readline().split()
    assert int(got) == count
    return count * 8 / 1e6 / float(seconds)


@pytest.mark.parametrize(
    ("sender", "receiver", "interface", "mbit"),
    [
        ("ib1", "ib2", "ib0", 400),
        ("roce3", "roce4", "roce0", 250),
        ("ib1", "roce1", "eth0", 50),
        ("eth1", "eth2", "eth0", 50),
    ],
)
def test_bytes_go_over_the_nic_they_are_sent_to_at_its_rate(
    bed: Path, sender: str, receiver: str, interface: str, mbit: float
) -> None:
    count = int(mbit * 1e6 / 8)  # a second's worth
    before = {node: counters(node) for node in (sender, receiver)}
    # Never faster than the rate (a bucket's content aside); how much slower depends on what else the machine does.
    assert 0.4 * mbit < transfer(sender, receiver, interface, count) < 1.02 * mbit
    after = {node: counters(node) for node in (sender, receiver)}
    for name in before[sender]:
        sent = after[sender][name][0] - before[sender][name][0]
        assert count <= sent <= 1.05 * count if name == interface else sent < 10_000, name
    for name in before[receiver]:
        received = after[receiver][name][1] - before[receiver][name][1]
        assert count <= received <= 1.05 * count if name == interface else received < 10_000, name


def test_fabrics_do_not_reach_each_other(bed: Path) -> None:
    goal = address("roce1", "roce0")
    done = beds.exec_in("ib1", [sys.executable, str(PEER), "send", goal, "9", "1"], capture=True)
    assert done.returncode != 0 and "unreachable" in done.stderr


def test_a_nodes_name_is_its_ethernet_address(bed: Path) -> None:
    for node in ("ib1", "eth2"):
        done = beds.exec_in("roce1", ["getent", "hosts", node], capture=True)
        assert done.stdout.split()[0] == address(node, "eth0")


def test_exec_passes_the_exit_code_and_refuses_unknown_nodes(bed: Path) -> None:
    assert beds.exec_in("ib2", ["sh", "-c", "hostname; exit 7"], capture=True).returncode == 7
    assert beds.exec_in("ib2", ["hostname"], capture=True).stdout == "ib2\n"
    with pytest.raises(TestbedError, match="did you mean 'roce1'"):
        beds.exec_in("roc1", ["true"])


def test_two_testbeds_stand_side_by_side(bed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as folder:
        monkeypatch.setenv("HOLMES_TESTBED", folder)
        monkeypatch.setenv("SLURM_CONF", f"{folder}/etc/slurm.conf")
        try:
            beds.up("two-ib")
            prefix = prefix_of(Path(folder))
            assert len(slurm("sinfo", "-h", "-N", "-o", "%N").split()) == 8
            assert slurm("srun", "-p", "ib-b", "hostname") == "ibb1\n"
        finally:
            assert beds.down() is True
        assert os.listdir(folder) == []  # the directory was there before, so it stays
        assert traces(Path(folder), prefix) == [folder]
    monkeypatch.setenv("HOLMES_TESTBED", str(bed))
    monkeypatch.setenv("SLURM_CONF", f"{bed}/etc/slurm.conf")
    assert beds.status()["up"] is True
    assert slurm("srun", "-p", "ib", "hostname") == "ib1\n"


@pytest.mark.parametrize("program", ["munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd"])
def test_up_starts_again_what_has_died(bed: Path, program: str) -> None:
    others = {name: pids(name, bed) for name in processes.DAEMONS if name != program}
    victims = pids(program, bed)
    if not victims and program == "munged":
        pytest.skip("the daemons of this Slurm trust a key")
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    while set(victims) & set(pids(program, bed)):  # a process of many threads takes a while to die
        time.sleep(0.01)
    assert beds.status()["up"] is False
    said: list[str] = []
    beds.up(progress=said.append)
    assert said and said[0].startswith("starting again: ") and program in said[0]
    assert not set(victims) & set(pids(program, bed))
    assert {name: pids(name, bed) for name in others} == others
    assert slurm("srun", "-p", "roce", "hostname") == "roce1\n"


def test_up_makes_a_broken_network_anew(bed: Path) -> None:
    subprocess.run(["ip", "netns", "del", f"{prefix_of(bed)}-ib3"], check=True)
    said: list[str] = []
    beds.up(progress=said.append)
    assert "the testbed is broken: making it anew" in said
    assert slurm("srun", "-w", "ib3", "hostname") == "ib3\n"


def test_down_after_killed_daemons_and_with_a_running_job_leaves_nothing(bed: Path) -> None:
    prefix = prefix_of(bed)
    job = slurm("sbatch", "--parsable", "-p", "ib", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 300").strip()
    wait_for(job, "RUNNING")
    for pid in pids("slurmd", bed) + pids("slurmctld", bed):
        os.kill(pid, signal.SIGKILL)
    assert beds.down() is True
    assert traces(bed, prefix) == []
    assert beds.down() is False


def test_down_does_not_delete_through_a_mount(bed: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    (bed / "log" / "x").mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path), str(bed / "log" / "x")], check=True)
    assert beds.down() is True
    assert (tmp_path / "thesis.tex").read_text() == "dear"
    assert str(bed) not in Path("/proc/mounts").read_text()


def test_another_releases_files_are_seen_inside_only(tmp_path: Path) -> None:
    root = tmp_path / "release"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "of-the-release").write_text("yes")
    (root / "usr" / "bin").mkdir(parents=True)
    for program in ("cat", "mount", "sh"):
        shutil.copy(shutil.which(program) or program, root / "usr" / "bin" / program)
    (root / "usr" / "bin" / "sinfo").write_text('#!/bin/sh\ncat /etc/of-the-release; echo "$PWD $1"\n')
    (root / "usr" / "bin" / "sinfo").chmod(0o755)
    userland.write_wrappers(root, tmp_path / "bin")
    assert sorted(os.listdir(tmp_path / "bin")) == ["in-release", "sinfo"]
    for argv in (["sinfo", "a b"], ["in-release", "sinfo", "a b"]):
        done = subprocess.run(
            [tmp_path / "bin" / argv[0], *argv[1:]],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": SYSTEM_PATH},
        )  # not a testbed's own wrappers
        assert done.stdout == f"yes{tmp_path} a b\n", done.stderr
    assert not Path("/etc/of-the-release").exists()


def test_a_failure_half_way_undoes_itself(place: Path, tmp_path: Path) -> None:
    beds.down()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        "name: wrong\nethernet_mbit: 5\nfabrics: [{name: e, nic: ethernet, partition: e, nodes: 2}]\n"
        "slurm: {SelectType: select/nonsense}\n"
    )
    seen: list[str] = []
    with pytest.raises(TestbedError) as caught:
        beds.up(wrong, progress=lambda line: seen.append(prefix_of(place) if (place / FILE).exists() else ""))
    assert "\n" not in str(caught.value)
    prefix = next(filter(None, seen))
    assert traces(place, prefix) == []


@pytest.mark.parametrize("capability", ["sys_admin", "net_admin"])
def test_a_container_without_the_capability_is_told_so_and_left_clean(place: Path, capability: str) -> None:
    beds.down()
    less = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    done = subprocess.run([*less, sys.executable, "-c", UP], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and f"CAP_{capability.upper()}" in last and "not permitted" in last, last
    assert not place.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("when", ["record", "servers"])
def test_a_killed_up_leaves_nothing_after_down(place: Path, how: signal.Signals, when: str) -> None:
    beds.down()
    with subprocess.Popen([sys.executable, "-c", UP], stderr=subprocess.PIPE) as process:
        mark = place / (FILE if when == "record" else "log/slurmdbd.out")
        for _ in range(3000):
            if mark.exists() or process.poll() is not None:
                break
            time.sleep(0.01)
        prefix = prefix_of(place)
        process.send_signal(how)
    assert process.returncode != 0
    if how == signal.SIGTERM:
        assert traces(place, prefix) == []
    else:
        assert traces(place, prefix) != []
        assert beds.status()["up"] is False
        assert beds.down() is True
        assert traces(place, prefix) == []


def test_up_after_a_killed_up_starts_anew(place: Path) -> None:
    beds.down()
    with subprocess.Popen([sys.executable, "-c", UP]) as process:
        while not (place / "log").exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    beds.up("default")
    assert beds.status()["up"] is True
