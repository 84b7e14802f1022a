"""Checks for faults of a site that make runs fail or slow them down. Only :func:`examine` runs commands."""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.finding import LEVELS, MAX_SKEW_S, Finding
from holmes_hpc.fabric.grouping import Grouping, NodeSettings
from holmes_hpc.fabric.listing import Listing, listing_of
from holmes_hpc.fabric.nccl import refusals
from holmes_hpc.fabric.node_facts import Facts, ask_nodes
from holmes_hpc.fabric.nodes import SiteNode, grouped, read_nodes
from holmes_hpc.fabric.partitions import with_associations
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.fabric.site_file_check import changes_since_written
from holmes_hpc.fabric.software import check_software, software
from holmes_hpc.records.find import runs_root
from holmes_hpc.records.untrusted import read_file
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.scontrol import Config, Partition, read_config, read_partitions

OLDEST = (22, 5)  # the oldest supported release of Slurm
SAFE_HETJOBS = (24, 11)  # the first release in which an impossible component cannot kill slurmctld


def _config_cases(config: Config) -> Iterator[tuple[bool, str, str, str]]:
    """Yield (whether it applies, level, problem, hint) for each setting that hinders heterogeneous jobs or restarts."""
    for problem, hint in config.hetjob_obstacles():
        yield True, "error", problem, hint
    version, release = config.version or SAFE_HETJOBS, f"Slurm {config.get('SLURM_VERSION')}"
    problem = f"{release} is not supported: nothing was tried with it"
    yield version < OLDEST, "warning", problem, "use Slurm 22.05 or later"
    problem = f"{release}: a heterogeneous job with an impossible component other than the first can kill slurmctld"
    hint = "submit with `holmes submit`, which tries each component alone first, or upgrade to 24.11"
    yield version < SAFE_HETJOBS, "warning", problem, hint
    has_no_database = config.get("AccountingStorageType") in ("", "(null)", "accounting_storage/none")
    problem = "no slurmdbd: sacct does not report that jobs end, so plain submitit treats them as running for ever"
    hint = "set AccountingStorageType=accounting_storage/slurmdbd; until then `holmes status` reads result.json"
    yield has_no_database, "warning", problem, hint
    problem = "JobRequeue is 0: Slurm does not restart a run after a node failure"
    yield config.get("JobRequeue") == "0", "warning", problem, "set JobRequeue=1, or use `holmes resume`"
    problem = "KillOnBadExit is 0: with a plain srun a dead rank leaves the others running"
    hint = "use srun --kill-on-bad-exit=1 in your own scripts (holmes submit does), or set KillOnBadExit=1"
    yield config.get("KillOnBadExit") != "1", "info", problem, hint
    problem = "node_features/helpers refuses counts and brackets in constraints"
    hint = "use the constraints of `holmes nodes` in your own scripts; they have none"
    yield any("helpers" in p for p in config.options("NodeFeaturesPlugins")), "info", problem, hint


def check_features(nodes: Sequence[SiteNode], grouping: Grouping) -> Iterator[Finding]:
    """Yield findings on nodes that are not used, and features that are unknown, contradictory or incomplete."""
    for node, reason in grouping.left_out.items():
        if "down, drained" not in reason:
            yield Finding("warning", f"node {node}", f"not used: {reason}", "see `holmes nodes`", node)
    planned_states = {"MAINT", "MAINTENANCE", "POWERING_DOWN"}
    returning = [n.name for n in nodes if not n.usable and not planned_states.isdisjoint(n.states)]
    if returning:
        text, hint = "in maintenance or powering down, so not used", "wait, or see `scontrol show reservations`"
        yield Finding("info", f"nodes {compress(returning)}", text, hint)
    down = [n for n in nodes if not n.usable and n.name not in returning]
    for reason, members in grouped((n.reason.partition(" [")[0] or "no reason given", n.name) for n in down):
        hint = f"scontrol update NodeName={compress(members)} State=RESUME when repaired"
        yield Finding("warning", f"nodes {compress(members)}", f"down or drained: {reason}", hint)
    if features := list(dict.fromkeys(feature for n in nodes for feature in n.reading.unknown)):
        names = compress(n.name for n in nodes if n.reading.unknown)
        hint = "add rules for them to the site's own file (HOLMES_FEATURES), or list them there under ignored"
        yield Finding("info", f"nodes {names}", f"unknown features: {', '.join(features)}", hint)
    for n in (n for n in nodes if n.name not in grouping.left_out):
        for problem in n.reading.problems:
            yield Finding("warning", f"node {n.name}", problem, f"holmes label {n.name}", n.name)
    for line in grouping.assumptions:
        nodes_text, _, assumption = line.partition(": ")
        level, hint = "info", "label them with `holmes label`"
        if "no fabric label" in assumption:
            level, hint = "warning", "label them: holmes label --fabric NAME, one name for nodes that share a network"
        if "skipped" in assumption or assumption.startswith("GPU "):
            hint = "see `holmes nodes`"
        if not any(text in assumption for text in ("left out", "CPU rank", "SXM assumed")):
            yield Finding(level, f"nodes {nodes_text}", assumption, hint)


def check_partitions(partitions: Sequence[Partition], grouping: Grouping) -> Iterator[Finding]:
    """Yield findings on closed partitions and on the default partition. A component without `-p` runs in the default
    partition, whose nodes may belong to the wrong pool or to several pools."""
    pool_of = {node: pool.name for pool in grouping.pools for node in pool.node_names}
    hint = "state -p and -C for every component (holmes submit does)"
    for default in [p for p in partitions if p.default]:
        where, pools = f"partition {default.name}", sorted({pool_of[n] for n in default.nodes if n in pool_of})
        if len(pools) > 1:
            several = f"the default partition has nodes of {len(pools)} pools ({', '.join(pools)})"
            yield Finding("warning", where, f"{several}: a component without -p or -C may get any", hint)
        outside = ", ".join(pool.name for pool in grouping.pools if pool.partition != default.name)
        if outside and len(pools) == 1:
            problem = f"a component without a partition runs here, not on {outside}"
            yield Finding("info", where, problem, hint)
    for name in (p.name for p in partitions if not p.up):
        hint = f"scontrol update PartitionName={name} State=UP"
        yield Finding("info", f"partition {name}", "closed, so not used", hint)


def check_facts(facts: Sequence[Facts], env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on the facts that nodes report: wrong features, Ethernet addresses, clocks, hidden shared folders
    and NCCL's default interface. `env`: the user's environment variables."""
    networks = Counter(f.network for f in facts if f.network)
    common_network = networks.most_common(1)[0][0] if networks else ""
    for f in facts:
        where = f"node {f.node}"
        yield from f.findings
        if f.trouble:
            problem, _, hint = f.trouble.partition("; ")
            problem = f"no Ethernet address that others can reach: {problem}"
            yield Finding("error", where, problem, hint, f.node)
        elif f.network != common_network:
            address = f"its Ethernet address {f.address} ({f.ethernet})"
            problem = f"{address} is not in the network {common_network} of others"
            hint = "check that a route leads there, and that it is the right interface"
            yield Finding("warning", where, problem, hint, f.node, f.ethernet)
        if abs(f.skew_s) > MAX_SKEW_S:
            problem = f"its clock is {f.skew_s:+.0f} s off this machine's"
            hint = "start a time service there (chrony); munge refuses credentials at 300 s"
            yield Finding("warning", where, problem, hint, f.node)
        for note in (note for note in f.notes if " is DOWN" in note or "runs at" in note):
            yield Finding("warning", where, note, "check its cable and driver", f.node)
    for file, nodes in grouped((f.missing, f.node) for f in facts if f.missing):
        problem = f"do not see this machine's {Path(file).parent}, the folder of the runs"
        hint = "keep runs on a file system that all nodes share: HOLMES_RUNS=DIR, or run_dir=DIR"
        yield Finding("error", f"nodes {compress(nodes)}", problem, hint)
    ipoib_nodes = [f.node for f in facts if f.ipoib]
    if ipoib_nodes and not env.get("NCCL_SOCKET_IFNAME"):
        names = sorted({name for f in facts for name in f.ipoib})
        problem = f"NCCL's default is {', '.join(names)} (IPoIB), which other fabrics cannot reach"
        hint = "set NCCL_SOCKET_IFNAME in your own jobs (training does)"
        yield Finding("info", f"nodes {compress(ipoib_nodes)}", problem, hint)


_SRUN = re.compile(r"^[ \t]*(?:exec\s+)?srun\b(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)


def read_script(path: Path) -> list[Finding]:
    """Check a batch script file with :func:`check_script`. SiteError if it cannot be read."""
    with SiteError.instead_of(OSError, where=path, hint="give the path of a batch script"):
        return check_script(read_file(path).decode("utf-8", errors="replace"), str(path))


def check_script(text: str, name: str = "script") -> list[Finding]:
    """Check a user's batch script for the usual mistakes with heterogeneous jobs."""
    return [Finding("error", name, problem, hint) for applies, problem, hint in _script_cases(text) if applies]


def _script_cases(text: str) -> Iterator[tuple[Any, str, str]]:
    """Yield (whether the mistake is there, problem, hint)."""
    is_hetjob = re.search(r"^#SBATCH\s+hetjob\b", text, re.MULTILINE)
    for step in _SRUN.findall(text):
        line = " ".join(step.replace("\\\n", " ").split())[:60]
        kills = re.search(r"\s(?:-K(?:1|\b)|--kill-on-bad-exit(?!=0))", step)
        problem = f"`{line}` has no --kill-on-bad-exit: a dead rank leaves the others running"
        yield not kills, problem, "add --kill-on-bad-exit=1"
        problem = f"`{line}` has no --het-group: it runs in the first component only"
        yield is_hetjob and "--het-group" not in step, problem, "add --het-group=0,1,… with all components"
        has_job_id = re.search(r"(?:-o|--output|-e|--error)[= ]\S*%[jJA]", step)
        problem = f"`{line}` writes to a path with %j, which differs between components"
        yield is_hetjob and has_job_id, problem, "use a path without %j, %J and %A"
    for part in re.split(r"^#SBATCH\s+hetjob\b.*$", text, flags=re.MULTILINE):
        has_partition = re.search(r"^#SBATCH\b.*\s(-p|--partition)", part, re.MULTILINE)
        problem = "a component has no partition: it runs in the default one"
        yield is_hetjob and not has_partition, problem, "give every component -p and -C"
    problem = "singleton makes a heterogeneous job wait for itself"
    is_singleton = re.search(r"--dependency[= ]\S*singleton", text)
    yield is_hetjob and is_singleton, problem, "use --dependency=afterany:LEADER"


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without duplicates, errors first."""
    return sorted(dict.fromkeys(findings), key=lambda f: LEVELS.index(f.level))


def diagnose(config: Config, listing: Listing, facts: Sequence[Facts], env: Mapping[str, str]) -> list[Finding]:
    """Return all findings about a cluster, from what Slurm and the nodes (`facts`) reported. Runs no command."""
    nodes, grouping = listing.nodes, listing.grouping
    cases = _config_cases(config)
    findings = [Finding(level, "slurm.conf", problem, hint) for applies, level, problem, hint in cases if applies]
    findings += [*check_features(nodes, grouping), *check_partitions(listing.partitions, grouping)]
    if not grouping.pools:
        findings.append(Finding("error", f"cluster {config.cluster}", "no node can be used", "see the other findings"))
    versions = {f.node: f.software for f in facts if f.software}
    findings += check_software(versions, software(), [n.name for n in nodes if n.gpus])
    return ordered([*findings, *check_facts(facts, env), *refusals(env, {}, "", files=[])])


@contextmanager
def _marker_file() -> Iterator[Path | None]:
    """Create a temporary file in the folder of the runs, to test whether nodes see it; None if it is not writable."""
    folder = next(p for p in (runs_root().absolute(), *runs_root().absolute().parents) if p.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".holmes-shared-") as file:
            yield Path(file.name)
    except PermissionError:
        yield None


def examine(settings: NodeSettings = NodeSettings(), jobs: bool = True, site_file: str | None = None) -> list[Finding]:
    """Return all findings about this Slurm, errors first. `jobs`: whether short jobs also examine its idle nodes. The
    jobs inherit the environment of this process. `site_file`: the path of the site file in use, if any."""
    partitions, config = read_partitions(), read_config()
    settings = with_associations(settings, partitions)
    nodes = read_nodes(settings.vocabulary)
    facts, findings = list[Facts](), list[Finding]()
    if jobs:
        with _marker_file() as marker:
            facts, findings = ask_nodes(nodes, settings, marker)
    site = read_site_file(site_file) if site_file else None
    if site_file and site:
        try:
            changes = changes_since_written(site_file, site)
            findings += [Finding("warning", site_file, change, "see `holmes site`") for change in changes]
        except SiteError as e:
            findings.append(Finding("error", e.where, e.what, e.hint))
    listing = listing_of(config.cluster, nodes, partitions, settings, site)
    return ordered(diagnose(config, listing, facts, os.environ) + findings)
