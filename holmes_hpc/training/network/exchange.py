"""Exchanges of values between ranks or nodes through the key-value store of the rendezvous.

The last member to store its value writes the outcome as one compressed entry, so N members make N reads instead of N².
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from holmes_hpc.errors import NetworkError
from holmes_hpc.slurm.hostlist import compress

ANSWER_S = 10.0  # limit of the wait for the outcome that names the missing members

Combine = Callable[[list[Any]], Any]
Nodes = Mapping[str, Sequence[int]]  # the ranks of each node, by its name


def exchange(
    store: dist.Store,
    name: str,
    member: Any,
    members: Sequence[Any],
    value: Any,
    *,
    where: str = "rendezvous",
    kind: str = "ranks",
    timeout_s: float | None = None,
) -> list[Any]:
    """Publish this member's `value`, and return all members' values as plain data, in the order of `members`.

    `members`: the ranks or nodes, each of which calls this function; `kind`: ``ranks`` or ``nodes``, for messages.
    Raise NetworkError that names the members missing after `timeout_s` (None: the store's timeout). If a member stored
    an error in place of the values (:func:`set_outcome`), raise this error.
    """
    values = _add(store, name, member, members, value)
    if values is not None:
        set_outcome(store, name, values)
    return list(_outcome(store, name, [("", name, members)], where, kind, timeout_s))


def combine_by_node(
    store: dist.Store, name: str, rank: int, nodes: Nodes, value: Any, of_node: Combine, of_all: Combine, kind: Any
) -> Any:
    """Publish this rank's `value`. Return `of_all` of the results of `of_node`, which are in the order of `nodes`.

    All ranks call this function. `kind`: the type of the result. The last rank of a node combines the values of its
    ranks, and the last node those of all nodes, so no rank reads one value per rank. Raise NetworkError as
    :func:`exchange` does; it also names the nodes.
    """
    ranks = next(ranks for ranks in nodes.values() if rank in ranks)
    leaders = [ranks[0] for ranks in nodes.values()]
    values = _add(store, f"{name}/{ranks[0]}", rank, ranks, value)
    of_nodes = None if values is None else _add(store, f"{name}/nodes", ranks[0], leaders, of_node(values))
    if of_nodes is not None:
        set_outcome(store, name, of_all(of_nodes))
    members = ((node, f"{name}/{ranks[0]}", ranks) for node, ranks in nodes.items())
    return _outcome(store, name, members, "rendezvous", "ranks", None, kind)


def _add(store: dist.Store, name: str, member: Any, members: Sequence[Any], value: Any) -> list[Any] | None:
    """Store this member's value. If it is the last of `members`, return all values, otherwise None."""
    store.set(f"{name}/{member}", msgspec.json.encode(value).decode())
    if store.add(f"{name}/count", 1) < len(members):
        return None
    return [json.loads(text) for text in store.multi_get([f"{name}/{m}" for m in members])]


def set_outcome(store: dist.Store, name: str, outcome: Any, error: Mapping[str, str] | None = None) -> None:
    """End the exchange `name`: all members return `outcome`, or raise the NetworkError with the arguments `error`."""
    text = msgspec.json.encode({"value": outcome, "error": error})
    store.set(f"{name}/all", b64encode(zlib.compress(text)).decode())


def _outcome(
    store: dist.Store,
    name: str,
    groups: Iterable[tuple[str, str, Sequence[Any]]],
    where: str,
    member_kind: str,
    timeout_s: float | None,
    kind: Any = Any,
) -> Any:
    """Wait for the outcome of an exchange and return it. `groups`: nodes ("": unknown), prefixes of keys, members."""
    timeout = [] if timeout_s is None else [timedelta(seconds=timeout_s)]
    errors, limit = (RuntimeError, TimeoutError), "" if timeout_s is None else f" within {timeout_s:g} s"
    hint = "look at their logs; they started late, died, or cannot reach rank 0"
    what = f"the store did not answer{limit}"
    with NetworkError.instead_of(*errors, where=where, hint=hint, what=what):
        try:
            store.wait([f"{name}/all"], *timeout)
        except errors:
            if store.add(f"{name}/late", 1) == 1:  # the search for missing members takes long, so one member does it
                late = [(node, p, ms) for node, p, ms in groups if store.add(f"{p}/count", 0) < len(ms)]
                missing = compress(str(m) for _, p, ms in late for m in ms if not store.check([f"{p}/{m}"]))
                nodes = compress(node for node, *_ in late if node)
                many = member_kind if missing.endswith("]") else member_kind.removesuffix("s")
                what = f"{many} {missing}{nodes and f' ({nodes})'} did not join{limit}"
                set_outcome(store, name, None, {"what": what, "where": where, "hint": hint})
            store.wait([f"{name}/all"], timedelta(seconds=ANSWER_S))
        text = zlib.decompress(b64decode(store.get(f"{name}/all")))
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if error := msgspec.json.decode(raw["error"], type=dict[str, str] | None):
        raise NetworkError(**error)
    return msgspec.json.decode(raw["value"], type=kind)
