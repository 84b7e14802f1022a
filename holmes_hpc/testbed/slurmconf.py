"""The texts of Slurm's configuration files for one testbed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.topology import PRIORITY, Topology

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


def _auth_settings(paths: Paths, auth: str) -> dict[str, str]:
    # A requeued job restarts only after cred_expire. The default of 120 s would slow down recovery tests.
    if auth == SLURM:
        return {"AuthType": "auth/slurm", "CredType": "cred/slurm", "AuthInfo": "cred_expire=5"}
    return {
        "AuthType": "auth/munge",
        "AuthInfo": f"cred_expire=5,socket={paths.munge_socket}",
        # Connections to slurmdbd ignore AuthInfo and read munge's socket from this setting.
        "AccountingStoragePass": str(paths.munge_socket),
    }


def slurm_conf(paths: Paths, wiring: Wiring, ports: dict[str, int], auth: str = MUNGE) -> str:
    """Return the text of slurm.conf for all daemons and clients. The topology's settings replace those of the testbed.
    The nodes may have more CPUs than the machine."""
    topology = wiring.topology
    settings = {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{host_name()}({wiring.gateway})",
        "SlurmctldPort": str(ports["slurmctld"]),
        "SlurmdPort": str(ports["slurmd"]),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        **_auth_settings(paths, auth),
        "StateSaveLocation": str(paths.save),
        "SlurmdSpoolDir": f"{paths.spool}/%n",
        "SlurmctldPidFile": f"{paths.run}/slurmctld.pid",
        "SlurmdPidFile": f"{paths.run}/slurmd.%n.pid",
        "SlurmctldLogFile": f"{paths.log}/slurmctld.log",
        "SlurmdLogFile": f"{paths.log}/slurmd.%n.log",
        "SlurmctldParameters": "enable_expedited_requeue",  # for sbatch --requeue=expedite, since 25.11
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
        # Tests can add partitions that preempt each other: scontrol create PartitionName=… PriorityTier=…
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "MailProg": "/bin/true",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": wiring.gateway,
        "AccountingStoragePort": str(ports["slurmdbd"]),
        "JobAcctGatherType": "jobacct_gather/none",
        "JobCompType": "jobcomp/none",
    }
    overridden = {key.lower() for key in topology.slurm}
    lines = [
        *(f"{key}={value}" for key, value in settings.items() if key.lower() not in overridden),
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
    """Yield the lines of slurm.conf for the partitions of the fabrics, then for further ones."""
    members: dict[str, list[str]] = {}
    for node in topology.nodes:
        members.setdefault(node.fabric.partition, []).append(node.name)
    for number, (name, nodes) in enumerate(members.items()):
        yield (
            f"PartitionName={name} Nodes={','.join(nodes)} Default={'NO' if number else 'YES'} "
            f"MaxTime=INFINITE State=UP PriorityTier={PRIORITY} PreemptMode=OFF"
        )
    for extra in topology.partitions:
        names = extra.nodes or [n.name for n in topology.nodes]
        nodes = [n.name for n in topology.nodes if n.fabric.name in extra.fabrics and n.name in names]
        yield (
            f"PartitionName={extra.name} Nodes={','.join(nodes)} Default=NO MaxTime=INFINITE State=UP "
            f"PriorityTier={extra.priority} PreemptMode={extra.preempt.upper()} GraceTime={extra.grace_s}"
        )


def slurmdbd_conf(paths: Paths, wiring: Wiring, ports: dict[str, int], password: str, auth: str = MUNGE) -> str:
    """Return the text of slurmdbd.conf. The file must be beside slurm.conf and readable only by root."""
    return (
        "\n".join(
            [
                f"AuthType=auth/{auth}",
                *([f"AuthInfo=socket={paths.munge_socket}"] if auth == MUNGE else []),
                f"DbdHost={host_name()}",
                f"DbdAddr={wiring.gateway}",
                f"DbdPort={ports['slurmdbd']}",
                "SlurmUser=root",
                "DebugLevel=info",
                f"LogFile={paths.log}/slurmdbd.log",
                f"PidFile={paths.run}/slurmdbd.pid",
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
    """Return the SQL that MariaDB runs at each start: it creates Slurm's user and grants its rights."""
    return (
        f"CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';\n"
    )
