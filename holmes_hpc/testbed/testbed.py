"""Bringing a testbed up and taking it down: a real Slurm with shaped NICs on one machine.

Everything lies under one state directory (`record.state_dir`), and what lies outside it (namespaces, one interface,
processes) is found again from the record there. So two testbeds in two directories, and a Slurm that the machine
already runs, never meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmes_hpc.errors import TestbedError, nearest
from holmes_hpc.schema import refuse
from holmes_hpc.testbed import daemons, network, packages, processes, slurm_prefix, topology, userland
from holmes_hpc.testbed.commands import SYSTEM_PATH, require_machine, system_env
from holmes_hpc.testbed.daemons import Bed
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.record import FILE, Record, empty, locked, state_dir
from holmes_hpc.testbed.slurmconf import CLUSTER, MUNGE, Places
from holmes_hpc.testbed.topology import Topology

READY_S = 60
AWAY = ("down", "error", "fail", "inval", "unknown")  # what else Slurm says of a node (drained, planned, …) is no fault


def _quiet(_: str) -> None:
    pass


def _bed(directory: Path, record: Record) -> Bed:
    shape = topology.parse(record.topology, f"{directory / FILE}: topology")
    return Bed(
        Places(directory),
        Wiring(shape, record.prefix, record.subnet),
        ports=record.ports,
        password=record.password,
        userland=userland.root_of(directory, record.release),
        prefix=Path(record.slurm) if record.slurm else None,
        auth=record.auth,
    )


def _current() -> Bed:
    """Return the testbed that is up."""
    directory = state_dir()
    record = Record.read(directory)
    if record is None or not record.ready:
        raise TestbedError("is not up", where=f"testbed in {directory}", hint="holmes testbed up")
    return _bed(directory, record)


# --- up ---------------------------------------------------------------------------------------------------------------


def up(
    topology_path: str | Path | None = None,
    release: str | None = None,
    *,
    slurm: str | Path | None = None,
    source: str | Path | None = None,
    progress: Callable[[str], None] = _quiet,
) -> None:
    """Bring the testbed up and wait until every node can run jobs; when it is up, see that it is whole.

    :param topology_path: a topology file, or the name of one under slurm/testbed/; None: what is up, or else `default`.
    :param release: the Debian release whose Slurm is used; None: that of what is up, or else the machine's own.
    :param slurm: the prefix of another Slurm, installed by its `make install`; None: $HOLMES_TESTBED_SLURM, if set.
    :param source: of a Slurm that is built first (once): a folder or a tarball.
    :param progress: is told, in a line each, what is being done.
    :raises TestbedError: one line; whatever had been made is undone.
    """
    known, slurms = userland.RELEASES, [given for given in (release, slurm, source) if given is not None]
    refuse(
        "testbed",
        (release not in (None, *known), f"unknown release {release!r}", nearest(str(release), known)),
        (len(slurms) > 1, "more than one Slurm", "give --release, --slurm or --slurm-source"),
        error=TestbedError,
    )
    require_machine()
    prefix = _prefix(slurm, source, progress) if release is None else ""
    programs = (release or userland.NATIVE, prefix) if release or prefix else None
    text = None if topology_path is None else topology.text_of(topology_path)
    directory = state_dir()
    with processes.terminable(), locked(directory, create=True) as made:
        record = Record.read(directory)
        if record is not None and record.ready:
            bed = _bed(directory, record)
            if programs not in (None, (record.release, record.slurm)) or text not in (None, record.topology):
                raise TestbedError(
                    f"another one is up ({bed.wiring.topology.name}, {record.slurm or record.release})",
                    where=f"testbed in {directory}",
                    hint="holmes testbed down",
                )
            if _repair(bed, progress):
                return
            progress("the testbed is broken: making it anew")
        if record is not None:
            text, programs = text or record.topology, programs or (record.release, record.slurm)
            made = record.made_directory
            _undo(directory, record, keep_directory=True)
        elif os.listdir(directory):
            raise TestbedError("holds other files", where=str(directory), hint="set HOLMES_TESTBED to a new directory")
        try:
            _build(directory, text or topology.text_of(None), *(programs or (userland.NATIVE, "")), made, progress)
        except BaseException:
            progress("undoing what was made")
            half = Record.read(directory)
            if half is not None:
                _undo(directory, half)
            elif made:
                directory.rmdir()
            raise


def _prefix(slurm: str | Path | None, source: str | Path | None, progress: Callable[[str], None]) -> str:
    """The prefix of the Slurm that is asked for; empty: none in particular."""
    if source is not None:
        return str(slurm_prefix.built(Path(source), progress))
    given = slurm or os.environ.get("HOLMES_TESTBED_SLURM")
    return str(Path(given).absolute()) if given else ""


def _build(directory: Path, text: str, release: str, prefix: str, made: bool, progress: Callable[[str], None]) -> None:
    shape = topology.parse(text, str(directory / FILE))
    auth, needed = MUNGE, packages.SLURM if release == userland.NATIVE else packages.DEBOOTSTRAP
    if prefix:
        version = slurm_prefix.check(Path(prefix))
        auth = slurm_prefix.auth_of(Path(prefix), version)
        needed = {**packages.DATABASE, **(packages.MUNGE if auth == MUNGE else {})}
    packages.install({**packages.NODES, **needed}, progress)
    progress(f"making {len(shape.nodes)} nodes, their NICs and a database")
    with locked(network.SHARED, create=False):  # the next testbed sees this one's names and subnet
        record = replace(_new_record(directory, shape, text, release, made), slurm=prefix, auth=auth)
        record.write(directory)
        bed = _bed(directory, record)
        network.make(bed.wiring)
    if bed.userland is not None:
        userland.make(bed.userland, release, bed.mark, progress)
        userland.write_wrappers(bed.userland, directory / "bin")
    daemons.write_files(bed)
    daemons.make_database(bed)
    progress("starting Slurm's daemons")
    _start_servers(bed, bed.servers, progress)
    watch = daemons.start([daemons.slurmd(bed, node.name) for node in shape.nodes], bed, READY_S, progress)
    _wait_for_nodes(bed, progress, watch)
    replace(record, ready=True).write(directory)


def _new_record(directory: Path, shape: Topology, text: str, release: str, made: bool) -> Record:
    """Return the record of a testbed to be made in `directory`, with names, a subnet and ports that nobody uses."""
    taken = network.names_in_use()
    start = int(hashlib.sha256(str(directory).encode()).hexdigest()[:4], 16)
    prefixes = (f"hb{(start + step) % 65536:04x}" for step in range(65536))
    prefix = next(p for p in prefixes if not any(name == p or name.startswith(f"{p}-") for name in taken))
    subnet = network.free_subnet(prefix)
    return Record(
        prefix=prefix,
        subnet=subnet,
        ports=dict(zip(("slurmctld", "slurmdbd", "slurmd", "database"), network.free_ports(subnet), strict=False)),
        password=secrets.token_hex(16),
        release=release,
        topology=text,
        namespaces=Wiring(shape, prefix, subnet).namespaces,
        made_directory=made,
        run_netns=network.run_netns_state(),
    )


def _start_servers(bed: Bed, programs: Sequence[str], progress: Callable[[str], None]) -> None:
    """Start those of the servers, in the order in which they need each other."""
    ask = ["sacctmgr", "-nP", "show", "cluster", "format=cluster"]
    for program in (name for name in bed.servers if name in programs):
        if program == "slurmctld" and CLUSTER not in bed.slurm(ask, by="slurmdbd").split():  # it wants to be known
            bed.slurm(["sacctmgr", "-i", "add", "cluster", CLUSTER], by="slurmdbd")
        daemons.start([daemons.server(bed, program)], bed, READY_S, progress)


def _node_states(bed: Bed) -> dict[str, str]:
    """Node -> Slurm's state, in lower case (``idle``, ``mixed``, ``down*``, …)."""
    rows = bed.slurm(["sinfo", "-h", "-a", "-N", "-o", "%N %T"]).splitlines()
    return {name: state for name, state in (row.split() for row in rows)}


def registered(state: str) -> bool:
    """Whether a node of this state has a slurmd that answers, whatever jobs or people want of it."""
    return not state.endswith("*") and not state.startswith(AWAY)


def _wait_for_nodes(bed: Bed, progress: Callable[[str], None], watch: Callable[[], None]) -> None:
    began = told = time.monotonic()
    while True:
        states = _node_states(bed)
        waiting = [node for node, state in states.items() if not registered(state)]
        watch()
        if not waiting:
            return
        if time.monotonic() > began + READY_S:
            said = ", ".join(f"{node} is {states[node]}" for node in waiting[:5])
            raise TestbedError(
                f"{said} after {READY_S} s",
                where="testbed",
                hint=f"see that no firewall drops traffic of {bed.wiring.uplink}",
            )
        if (now := time.monotonic()) - told > daemons.TELL_S:
            told = now
            progress(f"waiting for {', '.join(waiting)} to register, {now - began:.0f} s of at most {READY_S}")
        time.sleep(0.1)


# --- looking after it -------------------------------------------------------------------------------------------------


def _inodes(namespaces: Sequence[str]) -> dict[int, str]:
    return {inode: name for name in namespaces if (inode := network.inode(name)) is not None}


def _living(bed: Bed) -> dict[str, bool]:
    """Daemon (``munged``, …, ``slurmd.ib1``) -> whether its process lives."""
    inodes = _inodes(bed.wiring.namespaces)
    found = processes.find(bed.places.root, inodes)
    servers = {f.program for f in found}
    nodes = {inodes.get(f.namespace) for f in found if f.program == "slurmd"}
    return {
        **{program: program in servers for program in bed.servers},
        **{f"slurmd.{node.name}": bed.wiring.namespace(node.name) in nodes for node in bed.wiring.topology.nodes},
    }


def _repair(bed: Bed, progress: Callable[[str], None]) -> bool:
    """Start the daemons that have died; False where that is not enough and all must be made anew."""
    if not network.complete(bed.wiring):
        return False
    dead = [name for name, lives in _living(bed).items() if not lives]
    try:
        if dead:
            progress(f"starting again: {', '.join(dead)}")
            _start_servers(bed, dead, progress)
        watch = daemons.start(
            [daemons.slurmd(bed, node.name) for node in bed.wiring.topology.nodes if f"slurmd.{node.name}" in dead],
            bed,
            READY_S,
            progress,
        )
        _wait_for_nodes(bed, progress, watch)
    except TestbedError as error:
        progress(str(error))
        return False
    return True


def status() -> dict[str, Any]:
    """What is there: ``{up, state_dir}``, and when it is up ``topology, release, slurm, daemons{name: lives}``,
    ``nodes[{name, partition, features, state, nics{name: mbit}}]``."""
    directory = state_dir()
    record = Record.read(directory)
    if record is None:
        return {"up": False, "state_dir": str(directory)}
    bed = _bed(directory, record)
    living = _living(bed)
    states: dict[str, str] = {}
    version = ""
    if living.get("munged", True) and living["slurmctld"]:  # without them the clients try for half a minute
        with contextlib.suppress(TestbedError):
            version = bed.slurm(["sinfo", "-V"]).strip()
            states = _node_states(bed)
    shape = bed.wiring.topology
    nodes = [
        {
            "name": node.name,
            "partition": node.fabric.partition,
            "features": list(shape.features(node.fabric)),
            "state": states.get(node.name, "unknown"),
            "nics": {nic.name: nic.mbit for nic in bed.wiring.nics(node)},
        }
        for node in shape.nodes
    ]
    return {
        "up": record.ready and all(living.values()),
        "state_dir": str(directory),
        "topology": shape.name,
        "release": record.slurm or record.release,
        "slurm": version,
        "daemons": living,
        "nodes": nodes,
    }


def nodes() -> list[str]:
    """The names of the nodes of the testbed that is up."""
    return [node.name for node in _current().wiring.topology.nodes]


def exec_in(
    node: str, argv: Sequence[str], *, capture: bool = False, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `argv` on a node, with its NICs, hostname and /sys; its exit code is in the answer, and with `capture`
    its output too.

    :raises TestbedError: no testbed, no such node, nothing to run.
    """
    bed = _with_node(node)
    refuse("testbed exec", (not argv, "no command", "write it after --"), error=TestbedError)
    require_machine()
    try:
        return subprocess.run(
            daemons.within(bed, node, argv),
            env={**system_env(), **os.environ, **_env(bed)},
            check=False,
            text=True,
            capture_output=capture,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise TestbedError(f"no end within {timeout_s} s", where=f"{node}: {argv[0]}", hint="allow more time") from None


def kill_node(node: str) -> None:
    """End all processes of a node at once, as a power cut does; `up` starts its slurmd again.

    :raises TestbedError: no testbed, no such node.
    """
    inode = network.inode(_with_node(node).wiring.namespace(node))
    if inode is not None:
        processes.end_inside(inode)


def _with_node(node: str) -> Bed:
    """The testbed that is up, which must have this node."""
    if node not in (names := nodes()):
        raise TestbedError(f"no such node {node!r}", where="testbed", hint=nearest(node, names))
    return _current()


def _env(bed: Bed) -> dict[str, str]:
    made = {"HOLMES_TESTBED": str(bed.places.root), **bed.env()}
    own = slurm_prefix.path_of(bed.prefix) if bed.prefix else str(bed.places.root / "bin")
    if bed.prefix or bed.userland:
        rest = os.environ.get("PATH", SYSTEM_PATH).split(":")
        made["PATH"] = ":".join([own, *(part for part in rest if part not in own.split(":"))])
    return made


def env() -> dict[str, str]:
    """The variables under which Slurm's client commands speak to this testbed.

    :raises TestbedError: it is not up.
    """
    return _env(_current())


# --- down -------------------------------------------------------------------------------------------------------------


def down(progress: Callable[[str], None] = _quiet) -> bool:
    """Remove all that `up` made, also what a killed `up` or crashed daemons left; False where there was nothing.

    :raises TestbedError: not root, or something does not go away; one line.
    """
    directory = state_dir()
    if not directory.is_dir():
        return False
    require_machine()
    try:
        with locked(directory, create=False):
            record = Record.read(directory)
            if record is None:
                return False
            progress(f"taking down the testbed in {directory}")
            _undo(directory, record)
    except FileNotFoundError:
        return False
    return True


def _undo(directory: Path, record: Record, keep_directory: bool = False) -> None:
    """End its processes, then its network, then its files; the record goes last, so this can be run again."""
    replace(record, ready=False).write(directory)
    packages.restore_policy()
    processes.end_all(directory, _inodes(record.namespaces))
    daemons.reap()
    network.remove(record.namespaces, record.prefix, record.run_netns)
    empty(directory)
    (directory / FILE).unlink()
    if record.made_directory and not keep_directory:
        directory.rmdir()
