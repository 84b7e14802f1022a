"""The text of Slurm's configuration files for one testbed; pure functions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.topology import PRIORITY, Topology

CLUSTER = "holmes"
MUNGE, SLURM = "munge", "slurm"  # by what Slurm's daemons trust each other: AuthType, a testbed's `auth`


class Places:
    """Where each file of a testbed lies, below its state directory."""

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

    def sack(self, daemon: str) -> Path:
        """Return where a daemon lays the socket by which commands ask it for auth/slurm's credentials."""
        return self.root / "sack" / daemon


def machine() -> str:
    """What Slurm compares SlurmctldHost and DbdHost with: the host's name up to the first dot."""
    return socket.gethostname().split(".")[0]


def _trust(places: Places, auth: str) -> dict[str, str]:
    # A requeued job starts again after cred_expire; the default of 120 s makes recovery tests crawl.
    if auth == SLURM:
        return {"AuthType": "auth/slurm", "CredType": "cred/slurm", "AuthInfo": "cred_expire=5"}
    return {
        "AuthType": "auth/munge",
        "AuthInfo": f"cred_expire=5,socket={places.munge_socket}",
        # Connections to slurmdbd do not use AuthInfo: for them this setting names munge's socket.
        "AccountingStoragePass": str(places.munge_socket),
    }


def slurm_conf(places: Places, wiring: Wiring, ports: dict[str, int], auth: str = MUNGE) -> str:
    """slurm.conf. Nodes claim more CPUs than the machine has; one file serves all daemons and clients."""
    topology = wiring.topology
    settings = {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{machine()}({wiring.gateway})",
        "SlurmctldPort": str(ports["slurmctld"]),
        "SlurmdPort": str(ports["slurmd"]),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        **_trust(places, auth),
        "StateSaveLocation": str(places.save),
        "SlurmdSpoolDir": f"{places.spool}/%n",
        "SlurmctldPidFile": f"{places.run}/slurmctld.pid",
        "SlurmdPidFile": f"{places.run}/slurmd.%n.pid",
        "SlurmctldLogFile": f"{places.log}/slurmctld.log",
        "SlurmdLogFile": f"{places.log}/slurmd.%n.log",
        "SlurmctldParameters": "enable_expedited_requeue",  # from 25.11 on: sbatch --requeue=expedite
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": "10",
        "SlurmdParameters": "config_overrides",
        "KillWait": "5",
        "ReturnToService": "2",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=1,sched_interval=1,bf_hetjob_immediate",
        # Lets tests add partitions that preempt each other: scontrol create PartitionName=… PriorityTier=…
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "MailProg": "/bin/true",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": wiring.gateway,
        "AccountingStoragePort": str(ports["slurmdbd"]),
        "JobAcctGatherType": "jobacct_gather/none",
        "JobCompType": "jobcomp/none",
    }
    given = {key.lower() for key in topology.slurm}
    lines = [
        *(f"{key}={value}" for key, value in settings.items() if key.lower() not in given),
        *(f"{key}={value}" for key, value in topology.slurm.items()),
        *(
            f"NodeName={node.name} NodeHostname={node.name} NodeAddr={wiring.management(node)} "
            f"CPUs={topology.cpus_per_node} RealMemory={topology.memory_mib} "
            f"Feature={','.join(topology.features(node.fabric))} State=UNKNOWN"
            for node in topology.nodes
        ),
        *_partitions(wiring.topology),
    ]
    return "\n".join(lines) + "\n"


def _partitions(topology: Topology) -> Iterator[str]:
    members: dict[str, list[str]] = {}
    for node in topology.nodes:
        members.setdefault(node.fabric.partition, []).append(node.name)
    for number, (name, nodes) in enumerate(members.items()):
        yield (
            f"PartitionName={name} Nodes={','.join(nodes)} Default={'NO' if number else 'YES'} "
            f"MaxTime=INFINITE State=UP PriorityTier={PRIORITY} PreemptMode=OFF"
        )
    for extra in topology.partitions:
        nodes = [node.name for node in topology.nodes if node.fabric.name in extra.fabrics]
        yield (
            f"PartitionName={extra.name} Nodes={','.join(nodes)} Default=NO MaxTime=INFINITE State=UP "
            f"PriorityTier={extra.priority} PreemptMode={extra.preempt.upper()} GraceTime={extra.grace_s}"
        )


def slurmdbd_conf(places: Places, wiring: Wiring, ports: dict[str, int], password: str, auth: str = MUNGE) -> str:
    """slurmdbd.conf; it must lie beside slurm.conf and be readable by root only."""
    return (
        "\n".join(
            [
                f"AuthType=auth/{auth}",
                *([f"AuthInfo=socket={places.munge_socket}"] if auth == MUNGE else []),
                f"DbdHost={machine()}",
                f"DbdAddr={wiring.gateway}",
                f"DbdPort={ports['slurmdbd']}",
                "SlurmUser=root",
                "DebugLevel=info",
                f"LogFile={places.log}/slurmdbd.log",
                f"PidFile={places.run}/slurmdbd.pid",
                "StorageType=accounting_storage/mysql",
                "StorageHost=127.0.0.1",
                f"StoragePort={ports['database']}",
                "StorageLoc=slurm_acct_db",
                "StorageUser=slurm",
                f"StoragePass={password}",
            ]
        )
        + "\n"
    )


def database_sql(password: str) -> str:
    """What MariaDB runs at each start: Slurm's user and its rights."""
    return (
        f"CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
    )
