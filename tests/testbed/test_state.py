"""The record, the lock, the processes that are ours, and what is put aside during an installation."""

from __future__ import annotations

import os
import shutil
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
from holmes_hpc.testbed.topology import find


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


def test_a_record_reads_back_and_only_root_may_read_it(tmp_path: Path) -> None:
    example(ready=True).write(tmp_path)
    assert Record.read(tmp_path) == example(ready=True)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [FILE]


def test_no_record_means_no_testbed(tmp_path: Path) -> None:
    assert Record.read(tmp_path) is None and Record.read(tmp_path / "missing") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1}'])
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(TestbedError) as caught:
        Record.read(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/" + "x" * 70, "/a b", "/a'b", "/", "/a:b"])
def test_a_directory_that_slurm_could_not_use_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HOLMES_TESTBED", path)
    with pytest.raises(TestbedError, match="HOLMES_TESTBED"):
        state_dir()


def test_the_lock_admits_one_at_a_time(tmp_path: Path) -> None:
    inside, most = [], []

    def enter() -> None:
        with locked(tmp_path, create=False):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_who_waited_for_a_removed_directory_makes_it_anew(tmp_path: Path) -> None:
    directory = tmp_path / "bed"
    made = []

    def later() -> None:
        with locked(directory, create=True) as mine:
            made.append((mine, directory.is_dir()))

    with locked(directory, create=True) as mine:
        assert mine
        thread = threading.Thread(target=later)
        thread.start()
        threading.Event().wait(0.1)
        directory.rmdir()
    thread.join(10)
    assert made == [(True, True)]


@pytest.fixture
def pretend(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts `sleep` under another program's name, and ends it."""
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
def test_only_servers_of_this_directory_are_ours(tmp_path: Path, pretend: Callable[..., int]) -> None:
    mine, other, below = tmp_path / "bed", tmp_path / "bed2", tmp_path / "x" / "bed"
    ours = {
        pretend("slurmctld-wlm", cwd=mine / "run"),
        pretend("debootstrap", cwd=tmp_path, env={processes.MARK: str(mine)}),
    }
    pretend("debootstrap", cwd=tmp_path, env={processes.MARK: str(other)})
    pretend("slurmctld-wlm", cwd=other)  # another testbed, whose path starts alike
    pretend("munged", cwd=below)
    pretend("munged", cwd=tmp_path)  # the machine's own
    pretend("somebodys-shell", cwd=mine)  # standing in our directory is no crime
    assert {found.pid for found in processes.find(mine, ())} == ours
    processes.end_all(mine, ())
    assert not processes.find(mine, ())
    assert len(processes.find(other, ())) == 2 and len(processes.find(below, ())) == 1


@pytest.mark.integration
def test_a_server_is_known_by_a_file_in_its_command_line(tmp_path: Path, pretend: Callable[..., int]) -> None:
    # sleep takes no such option, so it is given as its own name
    mine = tmp_path / "bed"
    pid = pretend("slurmdbd", cwd=tmp_path, argv=(f"--conf={mine}/etc/x",))
    pretend("slurmdbd", cwd=tmp_path, argv=(f"--conf=/other{mine}/etc/x",))
    pretend("slurmdbd", cwd=tmp_path, argv=(f"--conf={mine}2/etc/x",))
    assert [found.pid for found in processes.find(mine, ())] == [pid]


@pytest.mark.integration
def test_everything_in_our_namespaces_is_ours() -> None:
    own = os.stat("/proc/self/ns/net").st_ino
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in {found.pid for found in processes.find(Path("/nowhere"), {own})}
        assert os.getpid() not in {found.pid for found in processes.find(Path("/nowhere"), {own})}
    finally:
        child.kill()
        child.wait()


@pytest.mark.integration
def test_a_node_is_killed_with_what_it_forks_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = ["sh", "-c", "while :; do sleep 600 & sleep 0.01; done"]
    node, other = subprocess.Popen(forks, start_new_session=True), subprocess.Popen(["sleep", "600"])

    def namespace(pid: int) -> int:
        return 7 if os.getsid(pid) == node.pid else 8

    monkeypatch.setattr(processes, "_namespace", namespace)
    try:
        processes.end_inside(7)
        assert node.wait(5) == -9 and other.poll() is None
        assert not [p for p in Path("/proc").glob("[0-9]*") if f" {node.pid} " in _session(p)]
    finally:
        for each in (node, other):
            each.kill()
            each.wait()


def _session(process: Path) -> str:
    """The session of a process that lives, between blanks."""
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
def test_the_machines_policy_is_put_aside_and_back(policy: Path, kind: str) -> None:
    if kind == "file":
        policy.write_text("own")
        policy.chmod(0o741)
    elif kind == "link":
        policy.symlink_to("/bin/true")
    before = [
        (p.name, p.lstat().st_mode, os.readlink(p) if p.is_symlink() else p.read_text())
        for p in policy.parent.iterdir()
    ]
    with packages._no_services():
        assert subprocess.run([policy]).returncode == 101
    after = [
        (p.name, p.lstat().st_mode, os.readlink(p) if p.is_symlink() else p.read_text())
        for p in policy.parent.iterdir()
    ]
    assert after == before


def test_a_killed_installation_is_undone_later(policy: Path) -> None:
    policy.write_text("own")
    packages._no_services().__enter__()  # and never left
    packages.restore_policy()
    assert policy.read_text() == "own" and len(os.listdir(policy.parent)) == 1


def test_without_apt_the_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "present", lambda program: program in packages.NODES)
    with pytest.raises(TestbedError) as caught:
        packages.install({**packages.NODES, **packages.SLURM}, lambda _: None)
    assert "slurmctld" in str(caught.value) and "munged" in str(caught.value) and "\n" not in str(caught.value)


def test_only_root_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "is_root", lambda: False)
    monkeypatch.setenv("HOLMES_TESTBED", str(tmp_path / "bed"))
    with pytest.raises(TestbedError, match="root"):
        testbed.up()
    assert not (tmp_path / "bed").exists()


def test_a_directory_with_other_files_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "is_root", lambda: True)
    monkeypatch.setattr(testbed.packages, "install", lambda *_: pytest.fail("went on"))
    with pytest.MonkeyPatch.context() as patch:
        import tempfile

        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            (Path(folder) / "thesis.tex").write_text("dear")
            patch.setenv("HOLMES_TESTBED", folder)
            with pytest.raises(TestbedError, match="other files"):
                testbed.up()
            assert testbed.down() is False
            assert (Path(folder) / "thesis.tex").read_text() == "dear"


def test_asking_a_testbed_that_is_not_up_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_TESTBED", "/nonexistent/bed")
    for ask in (testbed.env, testbed.nodes, lambda: testbed.exec_in("ib1", ["true"])):
        with pytest.raises(TestbedError, match="holmes testbed up"):
            ask()
    assert testbed.status() == {"up": False, "state_dir": "/nonexistent/bed"}
    assert testbed.down() is False
    assert Path("/var/lib/holmes-testbed") == record.DEFAULT_DIRECTORY


def test_a_node_that_waits_for_somebody_is_no_broken_one() -> None:
    """Else `up`, after one slurmd died, would wait for nodes that jobs or people hold, and then make all anew."""
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
        if not testbed.registered(state)
    ] == ["idle*", "drained*", "down", "down*", "unknown*", "failing"]


@pytest.mark.integration
def test_a_daemon_that_is_slow_to_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "TELL_S", 0.0)
    said: list[str] = []
    slow = daemons.Daemon("slurmctld", ("sleep", "600"), lambda: len(said) > 1, entered=True)
    own = SimpleNamespace(places=SimpleNamespace(log=tmp_path, run=tmp_path), env=dict, mark={})
    try:
        daemons.start([slow], own, 60, said.append)  # type: ignore[arg-type]
    finally:
        process = daemons._CHILDREN.pop()
        process.kill()
        process.wait()
    assert len(said) == 2 and all(line.startswith("waiting for slurmctld to answer, ") for line in said)


def test_nodes_that_are_slow_to_register_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{"ib1": "unknown*", "ib2": "idle", "eth1": "down*"}, {"ib1": "idle", "ib2": "idle", "eth1": "idle"}]
    monkeypatch.setattr(testbed, "_node_states", lambda _: states.pop(0))
    monkeypatch.setattr(daemons, "TELL_S", -1.0)
    said: list[str] = []
    testbed._wait_for_nodes(None, said.append, lambda: None)  # type: ignore[arg-type]
    assert len(said) == 1 and said[0].startswith("waiting for ib1, eth1 to register, ")


def test_two_testbeds_that_begin_at_once_share_no_subnet_and_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subnets = ["10.70.0.0/16", "10.71.0.0/16"]
    used: list[str] = []
    began = threading.Barrier(2)

    def make(wiring: network.Wiring) -> None:
        time.sleep(0.1)  # as long as the other one could look for its own
        used.append(wiring.subnet)

    def nothing(*_: object) -> Callable[[], None]:
        return lambda: None

    monkeypatch.setattr(network, "free_subnet", lambda _: next(each for each in subnets if each not in used))
    monkeypatch.setattr(network, "names_in_use", list)
    monkeypatch.setattr(network, "make", make)
    for place, name in (
        (packages, "install"),
        (testbed.daemons, "write_files"),
        (testbed.daemons, "make_database"),
        (testbed.daemons, "start"),
        (testbed, "_start_servers"),
        (testbed, "_wait_for_nodes"),
    ):
        monkeypatch.setattr(place, name, nothing)
    text = find("default").read_text()

    def build(name: str) -> None:
        (tmp_path / name).mkdir()
        began.wait()
        testbed._build(tmp_path / name, text, "bookworm", "", True, lambda _: None)

    with ThreadPoolExecutor() as both:
        list(both.map(build, "ab"))
    made = [Record.read(tmp_path / name) for name in "ab"]
    assert sorted(each.subnet for each in made if each) == subnets == sorted(used)
    assert len({port for each in made if each for port in each.ports.values()}) == 8
