"""Output of sacct, squeue and `scontrol show` as Slurm 22.05 and 24.11 write it, with a test's values."""

from __future__ import annotations

from holmes_hpc.fabric.nodes import SiteNode, with_reading
from holmes_hpc.slurm.job_queries import SEPARATOR
from holmes_hpc.slurm.scontrol import Partition, parse_node, parse_partition

OS = "OS=Linux 6.1.0-18-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)"


def node_line(
    name: str,
    features: str = "",
    partitions: str = "ib",
    state: str = "IDLE",
    gres: str = "(null)",
    reason: str = "",
    active: str | None = None,
    release: str = "22.05.8",
) -> str:
    features_text = features or "(null)"
    reason_text = f" Reason={reason} [root@2024-05-01T10:00:00]" if reason else ""
    extra_fields = "" if release.startswith("22") else " BcastAddr=(null) Extra=(null)"
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.45 "
        f"AvailableFeatures={features_text} ActiveFeatures={features_text if active is None else active} Gres={gres} "
        f"NodeAddr=10.0.0.1 NodeHostName={name} Version={release}{extra_fields} {OS} RealMemory=16384 AllocMem=0 "
        f"FreeMem=8000 Sockets=8 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A "
        f"MCS_label=N/A Partitions={partitions or '(null)'} BootTime=2024-05-01T09:00:00 "
        f"CfgTRES=cpu=8,mem=16G,billing=8 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0{reason_text}"
    )


def node(name: str, features: str = "", partitions: str = "ib", **fields: str) -> SiteNode:
    return with_reading(parse_node(node_line(name, features, partitions, **fields)))


def partition_line(
    name: str, nodes: str, default: bool = False, state: str = "UP", priority: int = 1, max_time: str = "UNLIMITED"
) -> str:
    return (
        f"PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
        f"Default={'YES' if default else 'NO'} QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO "
        f"GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime={max_time} MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED "
        f"Nodes={nodes} PriorityJobFactor=1 PriorityTier={priority} RootOnly=NO ReqResv=NO OverSubscribe=NO "
        f"State={state} TotalCPUs=32 TotalNodes=4 SelectTypeParameters=NONE DefMemPerNode=UNLIMITED"
    )


def partition(name: str, nodes: str, **fields: object) -> Partition:
    return parse_partition(partition_line(name, nodes, **fields))  # type: ignore[arg-type]


def script(token: str) -> str:
    return f"/log/.submission_file_{token}.sh"


def sacct_line(
    job: str,
    state: str,
    *,
    code: str = "0:0",
    submit: float = 1000,
    name: str = "a",
    reason: str = "None",
    token: str = "",
) -> str:
    line = f"sbatch --parsable {script(token)}" if token else "sbatch job.sh"
    return SEPARATOR.join([job, state, code, str(int(submit)), reason, "ib1", name, line]) + "\n"


def squeue_line(
    job: str,
    state: str,
    *,
    submit: float = 1000,
    reason: str = "None",
    name: str = "a",
    start: float | None = None,
    token: str = "",
) -> str:
    start_text = "N/A" if start is None else str(int(start))
    return SEPARATOR.join([job, state, str(int(submit)), reason, "ib1", name, start_text, script(token)]) + "\n"
