"""The texts of Slurm's configuration files for one testbed."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.topology import SLURM_CONF, PartitionSpec, Topology

CLUSTER = "holmes"
MUNGE, SLURM = "munge", "slurm"  # auth plugins, values of a testbed's `auth`


class Paths:
    """The paths of a testbed's files, below its state directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.etc, self.run = root, root / "etc", root / "run"
        self.slurm_conf = self.etc / "slurm.conf"
        self.hosts = self.etc / "hosts"
        self.munge_key = self.etc / "munge.key"
        self.slurm_key = self.etc / "slurm.key"
        self.munge_socket = self.run / "munge.socket"
        self.database_socket = self.run / "mariadb.socket"
        self.log = root / "log"
        self.database = root / "database"
        self.spool = root / "spool"
        self.save = root / "save"

    def sack_folder(self, daemon: str) -> Path:
        """Return the folder of the socket at which `daemon` issues the credentials of auth/slurm."""
        return self.root / "sack" / daemon


def host_name() -> str:
    """Return this machine's name up to the first dot. Slurm compares SlurmctldHost and DbdHost with it."""
    return socket.gethostname().split(".")[0]


def _lines(settings: Mapping[str, object], **values: object) -> list[str]:
    """Return the lines of a configuration file, with `values` in place of the names in braces."""
    return [f"{key}={str(value).format(**values)}" for key, value in settings.items()]


def slurm_conf(paths: Paths, wiring: Wiring, ports: dict[str, int], auth: str = MUNGE) -> str:
    """Return the text of slurm.conf for all daemons and clients. The topology's settings replace the defaults."""
    topology = wiring.topology
    overridden = {key.lower() for key in topology.slurm}
    settings = {**SLURM_CONF["own"], **SLURM_CONF["auth"][auth], **SLURM_CONF["defaults"]}
    settings = {key: value for key, value in settings.items() if key.lower() not in overridden}
    lines = _lines(settings, paths=paths, ports=ports, host=host_name(), gateway=wiring.gateway, cluster=CLUSTER)
    lines += [f"{key}={value}" for key, value in topology.slurm.items()]
    for node in topology.nodes:
        address = f"NodeName={node.name} NodeHostname={node.name} NodeAddr={wiring.management(node)}"
        size = f"CPUs={topology.cpus_per_node} RealMemory={topology.memory_mib}"
        lines.append(f"{address} {size} Feature={','.join(topology.features(node.fabric))} State=UNKNOWN")
    return "\n".join([*lines, *_partitions(topology), ""])


def _partitions(topology: Topology) -> Iterator[str]:
    """Yield the lines of slurm.conf for the fabrics' partitions, then for the topology's further partitions."""
    names = dict.fromkeys(fabric.partition for fabric in topology.fabrics)
    own = [PartitionSpec(name, tuple(f.name for f in topology.fabrics if f.partition == name)) for name in names]
    for number, part in enumerate([*own, *topology.partitions]):
        nodes = [node.name for node in topology.nodes if node.fabric.name in part.fabrics]
        yield (
            f"PartitionName={part.name} Nodes={','.join(n for n in nodes if n in (part.nodes or nodes))} "
            f"Default={'NO' if number else 'YES'} MaxTime=INFINITE State=UP PriorityTier={part.priority} "
            f"PreemptMode={part.preempt.upper()} GraceTime={part.grace_s}"
        )


def slurmdbd_conf(paths: Paths, wiring: Wiring, ports: dict[str, int], password: str, auth: str = MUNGE) -> str:
    """Return the text of slurmdbd.conf. The file must be beside slurm.conf and readable only by root."""
    settings = SLURM_CONF["slurmdbd"] | ({"AuthInfo": "socket={paths.munge_socket}"} if auth == MUNGE else {})
    values = {"ports": ports, "host": host_name(), "gateway": wiring.gateway, "password": password, "auth": auth}
    return "\n".join(_lines(settings, paths=paths, **values)) + "\n"
