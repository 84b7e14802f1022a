"""A separate real testbed beside the session's: its Slurm and network, its repair, and complete removal."""

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

from holmes_hpc import testbed as testbed_module
from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import network, processes, userland
from holmes_hpc.testbed.commands import SYSTEM_PATH
from holmes_hpc.testbed.record import FILE, Record

pytestmark = pytest.mark.slurm
PEER = Path(__file__).parents[1] / "support" / "peer.py"
UP = "from holmes_hpc import testbed; testbed.up('default')"


@pytest.fixture(scope="module")
def state_directory() -> Iterator[Path]:
    """Return a state directory for this module. It is removed in any case."""
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(os.path.realpath(folder)) / "bed"
        patch.setenv("HOLMES_TESTBED", str(path))
        patch.setenv("SLURM_CONF", str(path / "etc" / "slurm.conf"))
        yield path
        testbed_module.down()


@pytest.fixture
def testbed_directory(state_directory: Path) -> Path:
    """Return the state directory of a complete testbed."""
    testbed_module.up("default")
    return state_directory


def leftovers(state_directory: Path, prefix: str) -> list[str]:
    """Return everything that remains of a testbed on this machine."""
    names = [name for name in network.names_in_use() if name.startswith(prefix)]
    names += [f"{process.program} {process.pid}" for process in processes.find(state_directory, ())]
    names += [
        line for line in Path("/proc/mounts").read_text().splitlines() if str(state_directory) in line or prefix in line
    ]
    return names + ([str(state_directory)] if state_directory.exists() else [])


def prefix_of(state_directory: Path) -> str:
    record = Record.read(state_directory)
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
        env={**os.environ, **testbed_module.env()},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pids_of(program: str, state_directory: Path) -> list[int]:
    record = Record.read(state_directory)
    assert record is not None
    inodes = network.inodes(record.namespaces)
    return [process.pid for process in processes.find(state_directory, inodes) if process.program == program]


def test_second_up_keeps_the_testbed(testbed_directory: Path) -> None:
    old_state = (
        Record.read(testbed_directory),
        sorted(pids_of("slurmd", testbed_directory)),
        pids_of("slurmctld", testbed_directory),
    )
    messages: list[str] = []
    testbed_module.up("default", progress=messages.append)
    assert (
        Record.read(testbed_directory),
        sorted(pids_of("slurmd", testbed_directory)),
        pids_of("slurmctld", testbed_directory),
    ) == old_state
    assert messages == []
    assert testbed_module.status()["up"] is True


def test_another_topology_is_refused_while_one_is_up(testbed_directory: Path) -> None:
    with pytest.raises(TestbedError, match=r"another one is up \(default.*holmes testbed down"):
        testbed_module.up("two-ib")


def test_slurm_shows_partitions_and_features(testbed_directory: Path) -> None:
    rows = {tuple(line.split()) for line in slurm("sinfo", "-h", "-N", "-o", "%R %N %f %T").splitlines()}
    assert len(rows) == 10
    assert ("ib", "ib1", "nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a", "idle") in rows
    assert ("roce", "roce4", "nic_roce,nic_0.25g,eth_0.05g,fabric_roce-a", "idle") in rows
    assert ("eth", "eth2", "nic_ethernet,nic_0.05g,eth_0.05g,fabric_eth-a", "idle") in rows


def test_hetjob_step_spans_three_components_with_their_nics(testbed_directory: Path) -> None:
    out = testbed_directory / "het.out"
    script = testbed_directory / "het.sh"
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


def test_accounting_shows_the_job(testbed_directory: Path) -> None:
    job = slurm("sbatch", "--parsable", "--wait", "-p", "eth", "-o", "/dev/null", "--wrap", "true").strip()
    for _ in range(100):
        states = slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", "state").split()
        if states == ["COMPLETED"]:
            break
        time.sleep(0.1)
    assert states == ["COMPLETED"]


def test_low_priority_partition_added_at_run_time_is_preempted(testbed_directory: Path) -> None:
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
        match = re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", job))
        if match and match[1] == state:
            return
        time.sleep(0.1)
    pytest.fail(f"job {job} is {match and match[1]}, not {state}")


def address(node: str, interface: str) -> str:
    rows = json.loads(testbed_module.exec_in(node, ["ip", "-j", "addr", "show", interface], capture=True).stdout)
    return str(rows[0]["addr_info"][0]["local"])


def counters(node: str) -> dict[str, tuple[int, int]]:
    """Return (bytes sent, bytes received) of each of a node's data NICs."""
    rows = json.loads(testbed_module.exec_in(node, ["ip", "-j", "-s", "link"], capture=True).stdout)
    return {
        row["ifname"]: (row["stats64"]["tx"]["bytes"], row["stats64"]["rx"]["bytes"])
        for row in rows
        if row["ifname"] not in ("lo", "mgmt0")
    }


def transfer(sender: str, receiver: str, interface: str, count: int) -> float:
    """Send `count` bytes to the receiver's address on `interface`. Return the receiver's rate in Mbit/s."""
    target = address(receiver, interface)
    code = "import sys; from holmes_hpc import testbed; sys.exit(testbed.exec_in(sys.argv[1], sys.argv[2:]).returncode)"
    server = subprocess.Popen(
        [sys.executable, "-c", code, receiver, sys.executable, str(PEER), "serve", target],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        done = testbed_module.exec_in(
            sender, [sys.executable, str(PEER), "send", target, port, str(count)], capture=True
        )
        assert done.returncode == 0, done.stderr
        num_bytes, seconds = server.stdout.readline().split()
    assert int(num_bytes) == count
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
def test_bytes_use_the_addressed_nic_at_its_rate(
    testbed_directory: Path, sender: str, receiver: str, interface: str, mbit: float
) -> None:
    count = int(mbit * 1e6 / 8)  # a second's worth
    old = {node: counters(node) for node in (sender, receiver)}
    # Never faster than the rate, apart from the bucket's content. How much slower depends on the machine's load.
    assert 0.4 * mbit < transfer(sender, receiver, interface, count) < 1.02 * mbit
    new = {node: counters(node) for node in (sender, receiver)}
    for name in old[sender]:
        sent = new[sender][name][0] - old[sender][name][0]
        assert count <= sent <= 1.05 * count if name == interface else sent < 10_000, name
    for name in old[receiver]:
        received = new[receiver][name][1] - old[receiver][name][1]
        assert count <= received <= 1.05 * count if name == interface else received < 10_000, name


def test_fabrics_cannot_reach_each_other(testbed_directory: Path) -> None:
    target = address("roce1", "roce0")
    done = testbed_module.exec_in("ib1", [sys.executable, str(PEER), "send", target, "9", "1"], capture=True)
    assert done.returncode != 0 and "unreachable" in done.stderr


def test_node_name_resolves_to_its_ethernet_address(testbed_directory: Path) -> None:
    for node in ("ib1", "eth2"):
        done = testbed_module.exec_in("roce1", ["getent", "hosts", node], capture=True)
        assert done.stdout.split()[0] == address(node, "eth0")


def test_exec_passes_the_exit_code_and_refuses_unknown_nodes(testbed_directory: Path) -> None:
    assert testbed_module.exec_in("ib2", ["sh", "-c", "hostname; exit 7"], capture=True).returncode == 7
    assert testbed_module.exec_in("ib2", ["hostname"], capture=True).stdout == "ib2\n"
    with pytest.raises(TestbedError, match="did you mean 'roce1'"):
        testbed_module.exec_in("roc1", ["true"])


def test_two_testbeds_run_side_by_side(testbed_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as folder:
        monkeypatch.setenv("HOLMES_TESTBED", folder)
        monkeypatch.setenv("SLURM_CONF", f"{folder}/etc/slurm.conf")
        try:
            testbed_module.up("two-ib")
            prefix = prefix_of(Path(folder))
            assert len(slurm("sinfo", "-h", "-N", "-o", "%N").split()) == 8
            assert slurm("srun", "-p", "ib-b", "hostname") == "ibb1\n"
        finally:
            assert testbed_module.down() is True
        assert os.listdir(folder) == []  # the directory existed before, so it stays
        assert leftovers(Path(folder), prefix) == [folder]
    monkeypatch.setenv("HOLMES_TESTBED", str(testbed_directory))
    monkeypatch.setenv("SLURM_CONF", f"{testbed_directory}/etc/slurm.conf")
    assert testbed_module.status()["up"] is True
    assert slurm("srun", "-p", "ib", "hostname") == "ib1\n"


@pytest.mark.parametrize("program", ["munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd"])
def test_up_restarts_dead_daemons(testbed_directory: Path, program: str) -> None:
    others = {name: pids_of(name, testbed_directory) for name in processes.DAEMONS if name != program}
    killed = pids_of(program, testbed_directory)
    if not killed and program == "munged":
        pytest.skip("this Slurm uses auth/slurm")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while set(killed) & set(pids_of(program, testbed_directory)):  # a process with many threads takes a while to end
        time.sleep(0.01)
    assert testbed_module.status()["up"] is False
    messages: list[str] = []
    testbed_module.up(progress=messages.append)
    assert messages and messages[0].startswith("restarting: ") and program in messages[0]
    assert not set(killed) & set(pids_of(program, testbed_directory))
    assert {name: pids_of(name, testbed_directory) for name in others} == others
    assert slurm("srun", "-p", "roce", "hostname") == "roce1\n"


def test_up_recreates_a_broken_network(testbed_directory: Path) -> None:
    subprocess.run(["ip", "netns", "del", f"{prefix_of(testbed_directory)}-ib3"], check=True)
    messages: list[str] = []
    testbed_module.up(progress=messages.append)
    assert "the testbed is broken: recreating it" in messages
    assert slurm("srun", "-w", "ib3", "hostname") == "ib3\n"


def test_down_with_killed_daemons_and_a_running_job_is_complete(testbed_directory: Path) -> None:
    prefix = prefix_of(testbed_directory)
    job = slurm("sbatch", "--parsable", "-p", "ib", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 300").strip()
    wait_for(job, "RUNNING")
    for pid in pids_of("slurmd", testbed_directory) + pids_of("slurmctld", testbed_directory):
        os.kill(pid, signal.SIGKILL)
    assert testbed_module.down() is True
    assert leftovers(testbed_directory, prefix) == []
    assert testbed_module.down() is False


def test_down_deletes_nothing_through_a_mount(testbed_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    (testbed_directory / "log" / "x").mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path), str(testbed_directory / "log" / "x")], check=True)
    assert testbed_module.down() is True
    assert (tmp_path / "thesis.tex").read_text() == "dear"
    assert str(testbed_directory) not in Path("/proc/mounts").read_text()


def test_files_of_another_release_are_visible_only_inside(tmp_path: Path) -> None:
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


def test_failed_up_removes_everything(state_directory: Path, tmp_path: Path) -> None:
    testbed_module.down()
    topology_file = tmp_path / "wrong.yaml"
    topology_file.write_text(
        "name: wrong\nethernet_mbit: 5\nfabrics: [{name: e, nic: ethernet, partition: e, nodes: 2}]\n"
        "slurm: {SelectType: select/nonsense}\n"
    )
    prefixes: list[str] = []
    with pytest.raises(TestbedError) as caught:
        testbed_module.up(
            topology_file,
            progress=lambda line: prefixes.append(
                prefix_of(state_directory) if (state_directory / FILE).exists() else ""
            ),
        )
    assert "\n" not in str(caught.value)
    prefix = next(filter(None, prefixes))
    assert leftovers(state_directory, prefix) == []


@pytest.mark.parametrize("capability", ["sys_admin", "net_admin"])
def test_missing_capability_is_named_and_leaves_nothing(state_directory: Path, capability: str) -> None:
    testbed_module.down()
    setpriv = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    done = subprocess.run([*setpriv, sys.executable, "-c", UP], capture_output=True, text=True)
    last_line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and f"CAP_{capability.upper()}" in last_line and "not permitted" in last_line, last_line
    assert not state_directory.exists()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("stage", ["record", "servers"])
def test_down_after_a_killed_up_is_complete(state_directory: Path, signal_number: signal.Signals, stage: str) -> None:
    testbed_module.down()
    with subprocess.Popen([sys.executable, "-c", UP], stderr=subprocess.PIPE) as process:
        marker = state_directory / (FILE if stage == "record" else "log/slurmdbd.out")
        for _ in range(3000):
            if marker.exists() or process.poll() is not None:
                break
            time.sleep(0.01)
        prefix = prefix_of(state_directory)
        process.send_signal(signal_number)
    assert process.returncode != 0
    if signal_number == signal.SIGTERM:
        assert leftovers(state_directory, prefix) == []
    else:
        assert leftovers(state_directory, prefix) != []
        assert testbed_module.status()["up"] is False
        assert testbed_module.down() is True
        assert leftovers(state_directory, prefix) == []


def test_up_after_a_killed_up_recreates_the_testbed(state_directory: Path) -> None:
    testbed_module.down()
    with subprocess.Popen([sys.executable, "-c", UP]) as process:
        while not (state_directory / "log").exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    testbed_module.up("default")
    assert testbed_module.status()["up"] is True
