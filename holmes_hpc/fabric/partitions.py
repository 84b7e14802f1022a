"""The partitions that a user's jobs may use, and the best one for a group of nodes."""

import contextlib
import grp
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holmes_hpc.fabric.nodes import SiteNode
from holmes_hpc.slurm.accounting import Association, read_associations
from holmes_hpc.slurm.scontrol import Partition

# Names of partitions for short, interactive or preemptible jobs.
_USES = r"interactive|debug|dev|devel|develop|test|testing|preempt\w*|backfill|scaveng\w*|free|unkillable|spot"
_SPECIAL = re.compile(rf"(?:^|[\W_])({_USES})(?:[\W_]|$)", re.IGNORECASE)
_PREEMPTIBLE = re.compile(r"REQUEUE|CANCEL|SUSPEND", re.IGNORECASE)


@dataclass(frozen=True)
class PoolJob:
    """The settings of the short jobs on one pool: options of srun, shell lines, and the command that starts Python."""

    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = ""


@dataclass(frozen=True)
class NodeSettings:
    """The user's settings for reading Slurm's nodes, and for short jobs that ask nodes for facts. `vocabulary`: the
    site's own file of features; None: the file in HOLMES_FEATURES; `partitions`: the only partitions to use; empty:
    all; `account`, `qos`, `reservation`: those of the user's jobs; None: not known; `setup`, `job_options`: shell lines
    and srun options of the short jobs; `associations`: accounts and QOS that the user may use, in place of an unknown
    `account` or `qos`; `groups`: the user's Unix groups; empty: not known; `pools`: name of a pool or a node ->
    additional settings of the short jobs there (:class:`PoolJob`)."""

    vocabulary: str | None = None
    partitions: tuple[str, ...] = ()
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    setup: tuple[str, ...] = ()
    job_options: tuple[str, ...] = ()
    associations: tuple[Association, ...] = ()
    groups: frozenset[str] = frozenset()
    pools: Mapping[str, PoolJob] = field(default_factory=dict, hash=False)


def with_associations(settings: NodeSettings, partitions: Sequence[Partition]) -> NodeSettings:
    """Return the settings with the user's Unix groups, and with associations if a partition limits accounts or QOS.
    Root gets no groups, because Slurm admits root to a partition regardless of groups."""
    groups = set[str]()
    for number in {os.getegid(), *os.getgroups()} if os.geteuid() else ():
        with contextlib.suppress(KeyError):  # a group without a name
            groups.add(grp.getgrgid(number).gr_name)
    settings = replace(settings, groups=frozenset(groups))
    is_limited = any(p.allow_accounts or p.deny_accounts or p.allow_qos or p.deny_qos for p in partitions)
    return replace(settings, associations=read_associations()) if is_limited else settings


def usable_partitions(
    partitions: Sequence[Partition], settings: NodeSettings
) -> tuple[dict[str, Partition], list[tuple[Partition, str]]]:
    """Return ({name: partition} that a job may use, (partition, reason) pairs of the other open partitions). One for
    special jobs (debug or preemptible, say) is used only if the user names it, or if only it has some nodes."""
    asked_for = [p for p in partitions if p.up and (not settings.partitions or p.name in settings.partitions)]
    reasons = [(p, _refusal(p, settings)) for p in asked_for]
    allowed = [p for p, reason in reasons if reason is None]
    skipped = [(p, reason) for p, reason in reasons if reason is not None]
    if not settings.partitions:
        special_uses = [(p, _special_use(p, allowed)) for p in allowed]
        reachable = {name for p, reason in special_uses if reason is None for name in p.nodes}
        skipped += [(p, use) for p, use in special_uses if use is not None and reachable.issuperset(p.nodes)]
    skipped_names = {p.name for p, _ in skipped}
    return {p.name: p for p in allowed if p.name not in skipped_names}, skipped


def _refusal(p: Partition, settings: NodeSettings) -> str | None:
    """Return why the partition does not accept the user's jobs; None if it accepts them, as far as is known."""
    if p.root_only:
        return "only root may use it"
    if p.hidden and p.name not in settings.partitions:
        return "it is hidden; partitions=[…] uses it"
    if p.allow_groups and settings.groups and settings.groups.isdisjoint(p.allow_groups):
        return f"you are in none of AllowGroups={','.join(p.allow_groups)}"
    account, qos = settings.account, settings.qos
    associations = [a for a in settings.associations if account in (None, a.accounts[0])]
    if associations and all(a.partition not in ("", p.name) for a in associations):
        return "sacctmgr shows no association of yours for it"
    usable = [a for a in associations if a.partition in ("", p.name)]
    choices = [(a.accounts, name) for a in usable for name in ((qos,) if qos else a.qos or (None,))]
    refusals = [_limit(p, *choice) for choice in choices or [((account,) if account else (), qos)]]
    return None if None in refusals else ", ".join(map(str, dict.fromkeys(refusals)))


def _limit(p: Partition, accounts: Sequence[str], qos: str | None) -> str | None:
    """Return why the partition does not accept jobs of this account and QOS; None if it does, or if both are unknown.
    `accounts`: the account and its parents, because recent Slurm admits the children of an allowed account."""
    allowed, denied = ({name.lower() for name in names} for names in (p.allow_accounts, p.deny_accounts))
    account = accounts[0].lower() if accounts else ""
    cases = (
        (account and allowed and allowed.isdisjoint(map(str.lower, accounts)), f"AllowAccounts lacks {account}"),
        (account and not allowed and account in denied, f"DenyAccounts has {account}"),
        (qos and p.allow_qos and qos not in p.allow_qos, f"AllowQos lacks {qos}"),
        (qos and not p.allow_qos and qos in p.deny_qos, f"DenyQos has {qos}"),
    )
    return next((reason for applies, reason in cases if applies), None)


def _special_use(p: Partition, others: Sequence[Partition]) -> str | None:
    """Return why the partition is not for long jobs; None if it is."""
    if match := _SPECIAL.search(p.name):
        return f"its name contains {match[1]}; partitions=[{p.name}] uses it"
    rivals = [q for q in others if q.priority > p.priority and not set(q.nodes).isdisjoint(p.nodes)]
    if rivals and _PREEMPTIBLE.search(p.preempt_mode):
        return f"its jobs are preempted (PreemptMode={p.preempt_mode}); partitions=[{p.name}] uses it"
    return None


def keeps_others_selectable(chosen: Partition, nodes: Sequence[SiteNode], open_: dict[str, Partition]) -> bool:
    """Return whether jobs can still select each of `nodes` outside `chosen`, by a partition without those in it."""
    selected = {n.name for n in nodes if chosen.name in n.partitions}
    free = {name for name, p in open_.items() if selected.isdisjoint(p.nodes)}
    return all(not free.isdisjoint(n.partitions) for n in nodes if n.name not in selected)


_Criterion = tuple[float | bool | str, str]  # (value: smaller is better, why a partition with a larger value is worse)


def ranked_partitions(
    members: Sequence[SiteNode], everyone: Sequence[SiteNode], options: Sequence[Partition], purest: bool = False
) -> dict[Partition, str]:
    """Rank the partitions in `options` for jobs on the nodes `members`. Return {partition: reason}, best first.
    The reason says why the partition is not the best: empty for the best, and if members of the best are missing.

    The criteria, in order of importance: most members that one job may use, fewest other nodes, most members, longest
    time limit, highest node limit, highest priority, not the default partition, first by name. With `purest`, the first
    two are: one job may use all members in the partition, fewest nodes of other NIC types. `everyone`: all that may."""
    names, nic = {n.name for n in members}, members[0].reading.nic
    other_names = {n.name for n in everyone if (n.reading.nic is not nic if purest else n.name not in names)}

    def criteria(p: Partition) -> list[_Criterion]:
        inside, outside = len(names & set(p.nodes)), len(other_names & set(p.nodes))
        allowed = int(min(inside, p.node_limit))
        return [
            (allowed < inside if purest else -allowed, "it allows a job fewer of them"),
            (outside, "it has other nodes too"),
            (-inside, ""),
            (-float("inf") if p.time_limit_min is None else -p.time_limit_min, "its time limit is shorter"),
            (-p.node_limit, "its node limit is lower"),
            (-p.priority, "its priority is lower"),
            (p.default, "it is the default"),
            (p.name, "its name sorts later"),
        ]

    def reason(p: Partition) -> str:
        if p is best or not (names & set(best.nodes)).issubset(p.nodes):
            return ""
        pairs = zip(criteria(p), criteria(best), strict=True)
        return next(reason for (value, reason), (least, _) in pairs if value != least)

    best, *_ = ranked = sorted(options, key=criteria)
    return {p: reason(p) for p in ranked}
