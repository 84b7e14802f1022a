"""The testbed's record, lock and processes, package installation, and progress messages."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import commands, daemons, network, packages, processes, record, testbed
from holmes_hpc.testbed.record import FILE, Record, locked, state_dir
from holmes_hpc.testbed.topology import find_file


def example(**values: object) -> Record:
    return Record(
        **{
            **dict(  # type: ignore[arg-type]
                prefix="hb0001",
                subnet="10.70.0.0/16",
                ports={"slurmd": 1},
                password="p",
                release="bookworm",
                topology="name: x",
                namespaces=("hb0001-switch",),
                made_directory=True,
                run_netns="absent",
            ),
            **values,
        }
    )


def test_record_round_trip_and_file_mode(tmp_path: Path) -> None:
    example(ready=True).write(tmp_path)
    assert Record.read(tmp_path) == example(ready=True)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [FILE]


def test_missing_record_means_no_testbed(tmp_path: Path) -> None:
    assert Record.read(tmp_path) is None and Record.read(tmp_path / "missing") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1}'])
def test_damaged_record_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(TestbedError) as caught:
        Record.read(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/" + "x" * 70, "/a b", "/a'b", "/", "/a:b"])
def test_unsuitable_directory_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HOLMES_TESTBED", path)
    with pytest.raises(TestbedError, match="HOLMES_TESTBED"):
        state_dir()


def test_lock_is_exclusive(tmp_path: Path) -> None:
    inside, counts = [], []

    def enter() -> None:
        with locked(tmp_path, create=False):
            inside.append(1)
            counts.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1, 1, 1, 1]


def test_waiter_recreates_a_removed_directory(tmp_path: Path) -> None:
    directory = tmp_path / "bed"
    results = []

    def later() -> None:
        with locked(directory, create=True) as is_new:
            results.append((is_new, directory.is_dir()))

    with locked(directory, create=True) as is_new:
        assert is_new
        thread = threading.Thread(target=later)
        thread.start()
        threading.Event().wait(0.1)
        directory.rmdir()
    thread.join(10)
    assert results == [(True, True)]


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Start copies of `sleep` under another program's name. Kill them after the test."""
    started = []

    def start(program: str, *, cwd: Path, argv: tuple[str, ...] = (), env: dict[str, str] | None = None) -> int:
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            shutil.copy(shutil.which("sleep") or "/bin/sleep", path)
        cwd.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [*argv, "600"] if argv else [program, "600"], executable=path, cwd=cwd, env={"PATH": "/bin", **(env or {})}
        )
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.integration
def test_only_servers_of_this_directory_are_found(tmp_path: Path, start_process: Callable[..., int]) -> None:
    directory, other, below = tmp_path / "bed", tmp_path / "bed2", tmp_path / "x" / "bed"
    expected = {
        start_process("slurmctld-wlm", cwd=directory / "run"),
        start_process("debootstrap", cwd=tmp_path, env={processes.MARK: str(directory)}),
    }
    start_process("debootstrap", cwd=tmp_path, env={processes.MARK: str(other)})
    start_process("slurmctld-wlm", cwd=other)  # another testbed, whose path has the same start
    start_process("munged", cwd=below)
    start_process("munged", cwd=tmp_path)  # of the machine's own Slurm
    start_process("somebodys-shell", cwd=directory)  # any program may work in the directory
    assert {process.pid for process in processes.find(directory, ())} == expected
    processes.kill_all(directory, ())
    assert not processes.find(directory, ())
    assert len(processes.find(other, ())) == 2 and len(processes.find(below, ())) == 1


@pytest.mark.integration
def test_server_is_found_by_a_path_in_its_command_line(tmp_path: Path, start_process: Callable[..., int]) -> None:
    # sleep has no such option, so it is passed as the program name
    directory = tmp_path / "bed"
    pid = start_process("slurmdbd", cwd=tmp_path, argv=(f"--conf={directory}/etc/x",))
    start_process("slurmdbd", cwd=tmp_path, argv=(f"--conf=/other{directory}/etc/x",))
    start_process("slurmdbd", cwd=tmp_path, argv=(f"--conf={directory}2/etc/x",))
    assert [process.pid for process in processes.find(directory, ())] == [pid]


@pytest.mark.integration
def test_processes_in_the_namespaces_are_found() -> None:
    namespace = os.stat("/proc/self/ns/net").st_ino
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in {process.pid for process in processes.find(Path("/nowhere"), {namespace})}
        assert os.getpid() not in {process.pid for process in processes.find(Path("/nowhere"), {namespace})}
    finally:
        child.kill()
        child.wait()


@pytest.mark.integration
def test_kill_all_of_a_namespace_kills_forks_and_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = ["sh", "-c", "while :; do sleep 600 & sleep 0.01; done"]
    node, other = subprocess.Popen(forks, start_new_session=True), subprocess.Popen(["sleep", "600"])

    def namespace(pid: int) -> int:
        return 7 if os.getsid(pid) == node.pid else 8

    monkeypatch.setattr(processes, "_namespace", namespace)
    try:
        processes.kill_all(None, {7})
        assert node.wait(5) == -9 and other.poll() is None
        assert not [p for p in Path("/proc").glob("[0-9]*") if f" {node.pid} " in _session(p)]
    finally:
        for process in (node, other):
            process.kill()
            process.wait()


@pytest.mark.integration
def test_kill_all_stops_all_processes_before_it_kills_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # the helper of srun cancels a step whose srun is killed before the helper
    pair, sent, send = [subprocess.Popen(["sleep", "600"]) for _ in range(2)], list[tuple[int, int]](), os.kill
    pids = {process.pid for process in pair}
    monkeypatch.setattr(processes, "_namespace", lambda pid: 7 if pid in pids else 8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: (sent.append((pid, number)), send(pid, number)))
        processes.kill_all(None, {7})
    assert [number for _, number in sent[:4]] == [signal.SIGSTOP] * 2 + [signal.SIGKILL] * 2
    assert [process.wait(5) for process in pair] == [-9, -9]


def _session(process: Path) -> str:
    """Return the session id of a live process between blanks, else ""."""
    try:
        state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return ""
    return "" if state == "Z" else f" {session} "


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "policy-rc.d"
    monkeypatch.setattr(packages, "POLICY", path)
    return path


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["none", "file", "link"])
def test_policy_of_the_machine_is_restored(policy: Path, kind: str) -> None:
    if kind == "file":
        policy.write_text("own")
        policy.chmod(0o741)
    elif kind == "link":
        policy.symlink_to("/bin/true")
    old_files = [
        (p.name, p.lstat().st_mode, os.readlink(p) if p.is_symlink() else p.read_text())
        for p in policy.parent.iterdir()
    ]
    with packages._services_held_back():
        assert subprocess.run([policy]).returncode == 101
    new_files = [
        (p.name, p.lstat().st_mode, os.readlink(p) if p.is_symlink() else p.read_text())
        for p in policy.parent.iterdir()
    ]
    assert new_files == old_files


def test_policy_is_restored_after_a_killed_installation(policy: Path) -> None:
    policy.write_text("own")
    packages._services_held_back().__enter__()  # as in a killed process, without exit
    packages.restore_policy()
    assert policy.read_text() == "own" and len(os.listdir(policy.parent)) == 1


def test_missing_programs_are_named_without_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda program: program in packages.NODES)
    with pytest.raises(TestbedError) as caught:
        packages.install({**packages.NODES, **packages.SLURM}, lambda _: None)
    assert "slurmctld" in str(caught.value) and "munged" in str(caught.value) and "\n" not in str(caught.value)


def test_up_needs_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOLMES_TESTBED", str(tmp_path / "bed"))
    with pytest.raises(TestbedError, match="root"):
        testbed.up()
    assert not (tmp_path / "bed").exists()


def test_directory_with_other_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.os, "geteuid", lambda: 0)
    monkeypatch.setattr(testbed.packages, "install", lambda *_: pytest.fail("continued"))
    with pytest.MonkeyPatch.context() as patch:
        import tempfile

        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            (Path(folder) / "thesis.tex").write_text("dear")
            patch.setenv("HOLMES_TESTBED", folder)
            with pytest.raises(TestbedError, match="not empty"):
                testbed.up()
            assert testbed.down() is False
            assert (Path(folder) / "thesis.tex").read_text() == "dear"


def test_queries_without_a_testbed_have_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_TESTBED", "/nonexistent/bed")
    for query in (testbed.env, testbed.nodes, lambda: testbed.exec_in("ib1", ["true"])):
        with pytest.raises(TestbedError, match="holmes testbed up"):
            query()
    assert testbed.status() == {"up": False, "state_dir": "/nonexistent/bed"}
    assert testbed.down() is False
    assert Path("/var/lib/holmes-testbed") == record.DEFAULT_DIRECTORY


def test_drained_and_reserved_nodes_count_as_registered() -> None:
    """Otherwise `up` would wait for drained nodes after the death of one slurmd, and then recreate everything."""
    assert [
        state
        for state in (
            "idle",
            "idle*",
            "mixed",
            "mixed-",
            "planned",
            "drained",
            "drained*",
            "down",
            "down*",
            "allocated+",
            "reserved",
            "unknown*",
            "failing",
            "completing",
        )
        if not testbed.is_registered(state)
    ] == ["idle*", "drained*", "down", "down*", "unknown*", "failing"]


@pytest.mark.integration
def test_progress_names_a_slow_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "PROGRESS_S", 0.0)
    messages: list[str] = []
    slow = daemons.Daemon("slurmctld", ("sleep", "600"), lambda: len(messages) > 1)
    fake_testbed = SimpleNamespace(paths=SimpleNamespace(log=tmp_path, run=tmp_path), env=dict, mark={})
    try:
        daemons.start([slow], fake_testbed, 60, messages.append)  # type: ignore[arg-type]
    finally:
        process = daemons._CHILDREN.pop()
        process.kill()
        process.wait()
    assert len(messages) == 2 and all(line.startswith("waiting for slurmctld to answer, ") for line in messages)


def test_progress_names_unregistered_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{"ib1": "unknown*", "ib2": "idle", "eth1": "down*"}, {"ib1": "idle", "ib2": "idle", "eth1": "idle"}]
    monkeypatch.setattr(testbed, "_node_states", lambda _: states.pop(0))
    monkeypatch.setattr(daemons, "PROGRESS_S", -1.0)
    messages: list[str] = []
    testbed._wait_for_nodes(None, messages.append, lambda: None)  # type: ignore[arg-type]
    assert len(messages) == 1 and messages[0].startswith("waiting for ib1, eth1 to register, ")


def test_concurrent_testbeds_share_no_subnet_or_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subnets = ["10.70.0.0/16", "10.71.0.0/16"]
    used: list[str] = []
    barrier = threading.Barrier(2)

    def create(wiring: network.Wiring) -> None:
        time.sleep(0.1)  # long enough for the other one to choose a subnet
        used.append(wiring.subnet)

    def do_nothing(*_: object) -> Callable[[], None]:
        return lambda: None

    monkeypatch.setattr(network, "free_subnet", lambda _: next(subnet for subnet in subnets if subnet not in used))
    monkeypatch.setattr(network, "names_in_use", list)
    monkeypatch.setattr(network, "create", create)
    for module, name in (
        (packages, "install"),
        (testbed.daemons, "write_files"),
        (testbed.daemons, "create_database"),
        (testbed, "_start_daemons"),
    ):
        monkeypatch.setattr(module, name, do_nothing)
    text = find_file("default").read_text()

    def set_up(name: str) -> None:
        (tmp_path / name).mkdir()
        barrier.wait()
        testbed._create(tmp_path / name, text, "bookworm", "", True, lambda _: None)

    with ThreadPoolExecutor() as pool:
        list(pool.map(set_up, "ab"))
    records = [Record.read(tmp_path / name) for name in "ab"]
    assert sorted(record.subnet for record in records if record) == subnets == sorted(used)
    assert len({port for record in records if record for port in record.ports.values()}) == 8
