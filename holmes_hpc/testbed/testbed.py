"""Creation and removal of a testbed: a real Slurm with shaped NICs on one machine.

All files are in one state directory (`record.state_dir`). Everything outside that directory (namespaces, one interface,
processes) can be found from the record in it. Testbeds do not affect each other, nor the machine's own Slurm.
"""

import contextlib
import hashlib
import os
import secrets
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmes_hpc.errors import TestbedError, nearest
from holmes_hpc.testbed import daemons, network, packages, processes, slurm_prefix, topology, userland
from holmes_hpc.testbed.commands import SYSTEM_PATH, Show, require_machine, sparsely, system_env
from holmes_hpc.testbed.daemons import Testbed
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.record import FILE, Record, locked, remove_files, state_dir
from holmes_hpc.testbed.slurmconf import CLUSTER, MUNGE, Paths
from holmes_hpc.testbed.topology import Topology
from holmes_hpc.waiting import attempts

READY_S = 60
UNAVAILABLE = ("down", "error", "fail", "inval", "unknown")  # prefixes of the node states that show a fault


def _load(directory: Path, record: Record) -> Testbed:
    """Return the testbed in `directory` that `record` describes."""
    layout = topology.parse(record.topology, f"{directory / FILE}: topology")
    wiring, prefix = Wiring(layout, record.prefix, record.subnet), Path(record.slurm) if record.slurm else None
    root = None if record.release == userland.NATIVE else directory / record.release
    return Testbed(Paths(directory), wiring, record.ports, record.password, root, prefix, record.auth)


def _current() -> Testbed:
    """Return the testbed that is up. Raise TestbedError if there is none."""
    directory = state_dir()
    record = Record.read(directory)
    if record is None or not record.ready:
        raise TestbedError("it is not up", where=f"testbed in {directory}", hint="run `holmes testbed up`")
    return _load(directory, record)


def up(
    topology_path: str | Path | None = None,
    release: str | None = None,
    *,
    slurm: str | Path | None = None,
    source: str | Path | None = None,
    progress: Show = lambda _: None,
) -> None:
    """Create the testbed and wait until every node can run jobs. If the testbed is up, repair it where necessary.

    `topology_path`: a topology file, or a name under slurm/testbed/; None: that of the existing testbed, or `default`.
    `release`: the Debian release whose Slurm is used; None: that of the existing testbed, or the machine's own Slurm.
    `slurm`: the prefix of a Slurm installed by `make install`; None: $HOLMES_TESTBED_SLURM, if set.
    `source`: the source of a Slurm (a folder or a tarball), which is built unless an earlier build exists.
    `progress`: called with a line about each activity.
    Raise TestbedError if the testbed cannot be created; everything created so far is then removed."""
    releases, sources = userland.RELEASES, [option for option in (release, slurm, source) if option is not None]
    TestbedError.refuse(
        "testbed",
        (release not in (None, *releases), f"unknown release {release!r}", nearest(str(release), releases)),
        (len(sources) > 1, "--release, --slurm and --slurm-source are mutually exclusive", "give one of them"),
    )
    require_machine()
    prefix = _requested_prefix(slurm, source, progress) if release is None else ""
    origin = (release or userland.NATIVE, prefix) if release or prefix else None
    text = None if topology_path is None else topology.read_text(topology_path)
    directory = state_dir()
    with processes.sigterm_as_exit(), locked(directory, create=True) as is_new:
        record = Record.read(directory)
        if record is not None and record.ready:
            testbed = _load(directory, record)
            if origin not in (None, (record.release, record.slurm)) or text not in (None, record.topology):
                problem = f"another one is up ({testbed.wiring.topology.name}, {record.slurm or record.release})"
                raise TestbedError(problem, where=f"testbed in {directory}", hint="run `holmes testbed down` first")
            if _repair(testbed, progress):
                return
            progress("the testbed is broken: recreating it")
        if record is not None:
            text, origin = text or record.topology, origin or (record.release, record.slurm)
            is_new = record.made_directory
            _remove(directory, record, keep_directory=True)
        elif os.listdir(directory):
            raise TestbedError("it is not empty", where=str(directory), hint="set HOLMES_TESTBED to a new directory")
        try:
            _create(directory, text or topology.read_text(None), *(origin or (userland.NATIVE, "")), is_new, progress)
        except BaseException:
            progress("removing the unfinished testbed")
            unfinished = Record.read(directory)
            if unfinished is not None:
                _remove(directory, unfinished)
            elif is_new:
                directory.rmdir()
            raise


def _requested_prefix(slurm: str | Path | None, source: str | Path | None, progress: Show) -> str:
    """Return the prefix of the requested Slurm; empty for Slurm from packages. Build it from `source` if needed."""
    if source is not None:
        return str(slurm_prefix.build(Path(source), progress))
    prefix = slurm or os.environ.get("HOLMES_TESTBED_SLURM")
    return str(Path(prefix).absolute()) if prefix else ""


def _create(directory: Path, text: str, release: str, prefix: str, is_new: bool, progress: Show) -> None:
    layout = topology.parse(text, str(directory / FILE))
    auth, programs = MUNGE, packages.SLURM if release == userland.NATIVE else packages.DEBOOTSTRAP
    if prefix:
        version = slurm_prefix.check_prefix(Path(prefix))
        auth = slurm_prefix.auth_plugin(Path(prefix), version)
        programs = {**packages.DATABASE, **(packages.MUNGE if auth == MUNGE else {})}
    packages.install({**packages.NODES, **programs}, progress)
    progress(f"creating {len(layout.nodes)} nodes, their NICs and a database")
    with locked(network.SHARED, create=False):  # so that another testbed sees the names and subnet of this one
        record = replace(_new_record(directory, layout, text, release, is_new), slurm=prefix, auth=auth)
        record.write(directory)
        testbed = _load(directory, record)
        network.create(testbed.wiring)
    if testbed.userland is not None:
        userland.create(testbed.userland, release, testbed.mark, progress)
        userland.write_wrappers(testbed.userland, directory / "bin")
    daemons.write_files(testbed)
    daemons.create_database(testbed)
    progress("starting Slurm's daemons")
    _start_daemons(testbed, _daemons_alive(testbed), progress)  # none is alive yet
    replace(record, ready=True).write(directory)


def _new_record(directory: Path, layout: Topology, text: str, release: str, is_new: bool) -> Record:
    """Return the record of a new testbed in `directory`, with names, subnet and ports that are not in use.
    `layout`: the topology in `text`; `is_new`: whether `up` created the directory."""
    used_names = network.names_in_use()
    start = int(hashlib.sha256(str(directory).encode()).hexdigest()[:4], 16)
    prefixes = (f"hb{(start + step) % 65536:04x}" for step in range(65536))
    prefix = next(p for p in prefixes if not any(name == p or name.startswith(f"{p}-") for name in used_names))
    subnet = network.free_subnet(prefix)
    ports = dict(zip(("slurmctld", "slurmdbd", "slurmd", "database"), network.free_ports(subnet), strict=False))
    namespaces, run_netns = Wiring(layout, prefix, subnet).namespaces, network.netns_folder_state()
    return Record(prefix, subnet, ports, secrets.token_hex(16), release, text, namespaces, is_new, run_netns)


def _start_daemons(testbed: Testbed, names: Collection[str], progress: Show) -> None:
    """Start the daemons `names` and wait until every node is registered. Each daemon starts after the daemons that it
    needs. Before slurmctld starts, its cluster is added to slurmdbd."""
    query = ["sacctmgr", "-nP", "show", "cluster", "format=cluster"]
    for program in (name for name in testbed.servers if name in names):
        if program == "slurmctld" and CLUSTER not in testbed.slurm(query, daemon="slurmdbd").split():
            testbed.slurm(["sacctmgr", "-i", "add", "cluster", CLUSTER], daemon="slurmdbd")
        daemons.start([daemons.server_daemon(testbed, program)], testbed, READY_S, progress)
    nodes = [node.name for node in testbed.wiring.topology.nodes if f"slurmd.{node.name}" in names]
    slurmds = [daemons.slurmd_daemon(testbed, name) for name in nodes]
    _wait_for_nodes(testbed, progress, daemons.start(slurmds, testbed, READY_S, progress))


def _node_states(testbed: Testbed) -> dict[str, str]:
    """Return {node: its state in Slurm, in lower case} (``idle``, ``mixed``, ``down*``, …)."""
    rows = testbed.slurm(["sinfo", "-h", "-a", "-N", "-o", "%N %T"]).splitlines()
    return {name: state for name, state in (row.split() for row in rows)}


def is_registered(state: str) -> bool:
    """Return whether a node in this state has a slurmd that answers. The node may be drained or reserved."""
    return not state.endswith("*") and not state.startswith(UNAVAILABLE)


def _wait_for_nodes(testbed: Testbed, progress: Show, check_alive: Callable[[], None]) -> None:
    """Wait until every node is registered. `check_alive`: function that raises TestbedError if a slurmd has died."""
    show = sparsely(progress, daemons.PROGRESS_S)
    for left_s in attempts(READY_S, 0.1):
        states = _node_states(testbed)
        unregistered = [node for node, state in states.items() if not is_registered(state)]
        check_alive()
        if not unregistered:
            return
        show(f"waiting for {', '.join(unregistered)} to register, {READY_S - left_s:.0f} s of at most {READY_S}")
    node_states = ", ".join(f"{node} is {states[node]}" for node in unregistered[:5])
    hint = f"check that no firewall drops traffic of {testbed.wiring.uplink}"
    raise TestbedError(f"{node_states} after {READY_S} s", where="testbed", hint=hint)


def _daemons_alive(testbed: Testbed) -> dict[str, bool]:
    """Return {daemon: whether its process is alive} for ``munged``, …, ``slurmd.ib1``."""
    inodes = network.inodes(testbed.wiring.namespaces)
    alive = processes.find(testbed.paths.root, inodes)
    servers = {process.program for process in alive}
    nodes = {inodes.get(process.namespace) for process in alive if process.program == "slurmd"}
    names = [node.name for node in testbed.wiring.topology.nodes]
    of_nodes = {f"slurmd.{name}": testbed.wiring.namespace(name) in nodes for name in names}
    return {program: program in servers for program in testbed.servers} | of_nodes


def _repair(testbed: Testbed, progress: Show) -> bool:
    """Restart the daemons that have died. Return False if the testbed must be recreated."""
    if not network.is_complete(testbed.wiring):
        return False
    dead = [name for name, is_alive in _daemons_alive(testbed).items() if not is_alive]
    try:
        if dead:
            progress(f"restarting: {', '.join(dead)}")
        _start_daemons(testbed, dead, progress)
    except TestbedError as error:
        progress(str(error))
        return False
    return True


def status() -> dict[str, Any]:
    """Return the testbed's state as JSON values: ``up`` (whether all of it runs) and ``state_dir``. If there is a
    testbed, the result also has ``topology`` (its name), ``release`` (the Debian release or the prefix of its Slurm),
    ``slurm`` (version of Slurm, empty if Slurm does not answer), ``daemons{name: is alive}`` and ``nodes[{name,
    partition, features, state, nics{name: rate in Mbit/s}}]``."""
    directory = state_dir()
    record = Record.read(directory)
    if record is None:
        return {"up": False, "state_dir": str(directory)}
    testbed = _load(directory, record)
    alive = _daemons_alive(testbed)
    states: dict[str, str] = {}
    version = ""
    if alive.get("munged", True) and alive["slurmctld"]:  # without them, the commands retry for half a minute
        with contextlib.suppress(TestbedError):
            version = testbed.slurm(["sinfo", "-V"]).strip()
            states = _node_states(testbed)
    layout, nodes = testbed.wiring.topology, []
    for node in layout.nodes:
        nics, features = {nic.name: nic.mbit for nic in testbed.wiring.nics(node)}, list(layout.features(node.fabric))
        description = {"name": node.name, "partition": node.fabric.partition, "features": features}
        nodes.append({**description, "state": states.get(node.name, "unknown"), "nics": nics})
    summary = {"up": record.ready and all(alive.values()), "state_dir": str(directory), "topology": layout.name}
    release = record.slurm or record.release  # the prefix of a Slurm that is not Debian's, or Debian's release
    return {**summary, "release": release, "slurm": version, "daemons": alive, "nodes": nodes}


def nodes() -> list[str]:
    """Return the names of the testbed's nodes."""
    return [node.name for node in _current().wiring.topology.nodes]


def exec_in(
    node: str, argv: Sequence[str], *, capture: bool = False, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `argv` on a node, with its NICs, hostname and /sys. With `capture`, the result contains the output.
    Raise TestbedError if there is no testbed, no such node or no command, or after `timeout_s`."""
    testbed = _load_with_node(node)
    TestbedError.refuse("testbed exec", (not argv, "no command", "write it after --"))
    require_machine()
    try:
        command, env = daemons.node_command(testbed, node, argv), {**system_env(), **os.environ, **_env(testbed)}
        return subprocess.run(command, env=env, check=False, text=True, capture_output=capture, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        problem = f"did not end within {timeout_s:g} s"
        raise TestbedError(problem, where=f"{node}: {argv[0]}", hint="allow more time") from None


def kill_node(node: str) -> None:
    """Kill all processes of a node, as a power cut would. A later `up` restarts the node's slurmd.
    Raise TestbedError if there is no testbed or no such node."""
    processes.kill_all(None, network.inodes([_load_with_node(node).wiring.namespace(node)]))


def _load_with_node(node: str) -> Testbed:
    """Return the testbed that is up. Raise TestbedError if it has no such node."""
    TestbedError.refuse_unknown("no such node", [node], nodes(), "testbed")
    return _current()


def _env(testbed: Testbed) -> dict[str, str]:
    """Return the environment variables for commands that use a testbed. Its programs come first in PATH, unless it uses
    the machine's Slurm. Ranks compute with one thread by default, because all nodes share one machine's CPUs."""
    variables = {"HOLMES_TESTBED": str(testbed.paths.root), **testbed.env()}
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    testbed_path = slurm_prefix.program_path(testbed.prefix) if testbed.prefix else str(testbed.paths.root / "bin")
    if testbed.prefix or testbed.userland:
        folders = os.environ.get("PATH", SYSTEM_PATH).split(":")
        variables["PATH"] = ":".join([testbed_path, *(f for f in folders if f not in testbed_path.split(":"))])
    return variables


def env() -> dict[str, str]:
    """Return the variables with which Slurm's commands use this testbed. Raise TestbedError if it is not up."""
    return _env(_current())


def down(progress: Show = lambda _: None) -> bool:
    """Remove everything that `up` created, even if `up` was killed or daemons have crashed. Return whether there was a
    testbed. `progress`: called with a line about the activity. Raise TestbedError if something cannot be removed."""
    directory = state_dir()
    if not directory.is_dir():
        return False
    require_machine()
    with contextlib.suppress(FileNotFoundError), locked(directory, create=False):
        if record := Record.read(directory):
            progress(f"removing the testbed in {directory}")
            _remove(directory, record)
            return True
    return False


def _remove(directory: Path, record: Record, keep_directory: bool = False) -> None:
    """Remove the testbed's processes, network and files. Remove the record last, so that `down` can be repeated."""
    replace(record, ready=False).write(directory)
    packages.restore_policy()
    processes.kill_all(directory, network.inodes(record.namespaces))
    daemons.reap()
    network.remove(record.namespaces, record.prefix, record.run_netns)
    remove_files(directory)
    (directory / FILE).unlink()
    if record.made_directory and not keep_directory:
        directory.rmdir()
