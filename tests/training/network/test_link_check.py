"""The link check over real sockets: each node is a thread with a loopback address of its own."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.training.network import link_sockets
from holmes_hpc.training.network.exchange import exchange
from holmes_hpc.training.network.link_check import Limits, await_link_check, run_link_check
from holmes_hpc.training.network.link_diagnosis import CommunicationGroup, Endpoint, LinkReport, NodeInformation
from holmes_hpc.training.network.link_sockets import LinkServer, reach, sample

# Long waits for a busy machine; the rates below are far under any loopback's.
LIMITS = Limits(join_s=30, connect_s=3, sample_s=0.05, repeat_s=0.05)

# msgspec crashes if threads use a class for the first time at once. Ranks are processes.
DECODERS = [msgspec.json.Decoder(kind) for kind in (NodeInformation, LinkReport)]


class Memory:
    """A key-value store between threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=5))
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            self.changed.notify_all()
            return int(self.values[key])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(k in self.values for k in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError(f"wait timeout: {keys}")


NODES = ["n1", "n2", "n3", "n4"]
SOURCE = Endpoint("lo", "127.0.1.2")


def nics(index: int, rdma: float = 1e-5, tcp: float = 1e-5) -> dict[str, Endpoint]:
    return {
        "rdma": Endpoint("lo", f"127.0.2.{index + 1}", gbps=rdma),
        "tcp": Endpoint("lo", f"127.0.1.{index + 1}", gbps=tcp),
    }


def groups() -> list[CommunicationGroup]:
    world = CommunicationGroup("world", "tcp", (0, 1, 2, 3), sampled=False)
    return [CommunicationGroup("dp 0", "rdma", (0, 1, 2)), CommunicationGroup("edge", "tcp", (2, 3)), world]


def run(nics_of=nics, nodes=NODES, tokens=None, started=None) -> list[list[Finding] | NetworkError]:
    """Return each node's outcome. `started`: the nodes that take part, None: all."""
    store = Memory()

    def check(i: int) -> list[Finding] | NetworkError:
        try:
            info = NodeInformation(nodes[i], "ib-a", (i,), nics_of(i))
            return run_link_check(store, info, nodes, groups(), (tokens or ["t"] * 4)[i], LIMITS)
        except NetworkError as e:
            return e

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(check, range(len(nodes)) if started is None else started))
    try:
        await_link_check(store, 0.1)
    except NetworkError as e:
        assert str(e) == str(results[0])
    else:
        assert not isinstance(results[0], NetworkError)
    return results


def test_a_healthy_job_has_no_finding() -> None:
    assert run() == [[], [], [], []]


def test_a_link_far_below_its_declared_rate_is_an_error_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holmes_hpc.training.network.link_diagnosis.ONE_STREAM_GBPS", 1e6)
    results = run(lambda i: nics(i, rdma=1e6))
    assert len({str(r) for r in results}) == 1 and "RDMA" in str(results[0]) and "lo 127.0.2." in str(results[0])


def test_a_link_server_with_another_runs_token_is_not_a_peer() -> None:
    results = run(tokens=["t", "t", "other", "t"])
    assert len({str(r) for r in results}) == 1 and "n3" in str(results[0]) and "127.0.2.3" in str(results[0])


def test_an_address_on_two_nodes_is_an_error() -> None:
    def same_tcp_address(i: int) -> dict[str, Endpoint]:
        return {**nics(i), "tcp": Endpoint("lo", "127.0.1.9", gbps=1)}

    results = run(same_tcp_address)
    assert "all have the address 127.0.1.9" in str(results[0]) and len({str(r) for r in results}) == 1


def test_a_missing_node_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "holmes_hpc.training.network.link_check._LinkCheck._gather",
        lambda self, name, value: exchange(self.store, name, self.node, self.nodes, value, kind="nodes", timeout_s=1.0),
    )
    results = run(started=[0, 1, 3])
    assert all("node n3 did not join within 1 s" in str(r) for r in results)


def test_a_server_on_an_unavailable_address_is_a_network_error() -> None:
    with pytest.raises(NetworkError, match=r"node n1: cannot listen on lo 192.0.2.77"):
        LinkServer("n1", "t", {"tcp": Endpoint("lo", "192.0.2.77")})
    with pytest.raises(NetworkError, match="cannot listen on ib7"):
        LinkServer("n1", "t", {"rdma": Endpoint("ib7", "127.0.0.1")})


def test_an_error_of_one_node_ends_the_check_on_all_nodes() -> None:
    results = run(lambda i: nics(i) if i else {**nics(i), "rdma": Endpoint("ib9", "127.0.2.1", gbps=1)})
    assert len({str(r) for r in results}) == 1 and "node n1: cannot listen on ib9" in str(results[0])


def test_reach_distinguishes_peers_other_nodes_and_refused_connections() -> None:
    with LinkServer("n1", "t", {"tcp": Endpoint("lo", "127.0.1.1")}) as server:
        port = server.ports["tcp"]
        silent = link_sockets.bound_socket("lo", "127.0.1.5")  # bound, not listening: refused
        replies = reach(
            SOURCE,
            {
                "n1": Endpoint("lo", "127.0.1.1", port, 1),
                "n9": Endpoint("lo", "127.0.1.1", port, 1),
                "n5": Endpoint("lo", "127.0.1.5", silent.getsockname()[1], 1),
            },
            "t",
            1,
        )
        silent.close()
    assert replies["n1"].failure == "" and abs(replies["n1"].skew_s) < 5
    assert "node n1 answers there" in replies["n9"].failure and "refused" in replies["n5"].failure


def test_reach_times_out_on_a_server_that_accepts_and_sends_nothing() -> None:
    mute = link_sockets.bound_socket("lo", "127.0.1.7")
    mute.listen(5)
    try:
        replies = reach(SOURCE, {"n7": Endpoint("lo", "127.0.1.7", mute.getsockname()[1], 1)}, "t", 0.2)
    finally:
        mute.close()
    assert replies["n7"].failure == "no answer in 0.2 s"


def test_reach_of_700_peers_stays_below_the_limit_of_open_files() -> None:
    with LinkServer("n", "t", {"tcp": Endpoint("lo", "127.0.1.1")}) as server:
        targets = {f"n{i}": Endpoint("lo", "127.0.1.1", server.ports["tcp"], 1) for i in range(700)}
        replies = reach(SOURCE, targets, "t", 10)
    assert len(replies) == 700 and all("node n answers there" in r.failure for r in replies.values())


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_link_server_does_not_answer_invalid_requests() -> None:
    with LinkServer("n", "t", {"tcp": Endpoint("lo", "127.0.1.1")}) as server:
        for request in (
            b"GET / HTTP/1.0\n",
            b"[1]\n",
            b"{}\n",
            b"[" * 1023 + b"\n",
            b"x" * 5000,
            b'{"token": "t", "seconds": "x"}\n',
        ):
            with link_sockets.bound_socket("lo", "127.0.1.2") as s:
                s.settimeout(2)
                s.connect(("127.0.1.1", server.ports["tcp"]))
                s.sendall(request)
                if b"token" not in request:
                    with contextlib.suppress(ConnectionResetError):
                        assert s.recv(100) == b""
        endpoint = Endpoint("lo", "127.0.1.1", server.ports["tcp"], 1)
        assert reach(SOURCE, {"n": endpoint}, "t", 1)["n"].failure == ""
        assert sample(SOURCE, endpoint, "wrong", 0.05) is None


def test_a_sample_has_a_rate_and_a_dead_target_has_none() -> None:
    with LinkServer("n", "t", {"tcp": Endpoint("lo", "127.0.1.1")}) as server:
        endpoint = Endpoint("lo", "127.0.1.1", server.ports["tcp"], 1)
        gbps = sample(SOURCE, endpoint, "t", 0.1)
    assert gbps is not None and gbps > 0
    assert sample(SOURCE, endpoint, "t", 0.1) is None
