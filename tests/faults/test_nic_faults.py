"""NICs that break, crawl or lie, on the testbed: each fault gives one line that names node, NIC and hint, in time.

Nodes and NICs are drawn from a seed, which is printed: HOLMES_FAULT_SEED=7 tries others. A table in docs/nics.md is
written from what the runs said when all of them passed with the usual seed.
"""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import silent

from holmes_hpc.errors import TestbedError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.testbed import packages
from holmes_hpc.testbed.network import tbf_line

pytestmark = [pytest.mark.slurm, pytest.mark.breaking]

HOLMES = str(Path(sys.executable).parent / "holmes")
PAGE = Path(__file__).parents[2] / "docs" / "nics.md"
BEGIN, END = "<!-- faults: written by tests/faults/test_nic_faults.py -->\n", "<!-- end of faults -->"
USUAL_SEED = 4
SEED = int(os.environ.get("HOLMES_FAULT_SEED", USUAL_SEED))
IN_TIME_S = 60  # from the first rank's start, or from the fault, to the end of `holmes run`
MBIT = {"ib": 400, "roce": 250}
SMALL = ["model.hidden=128", "model.ffn=384", "train.pace_layer_ms=2"]
ONE_FABRIC = "plan.nodes={{{0}: {1}}}|plan.pp=1|batch.global_size=24|train.steps=3|" + "|".join(SMALL)
HYBRID = ["plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", *SMALL]
ROWS: dict[str, tuple[str, str]] = {}  # fault -> what happens, what is said


def draw(fault: str, choices: list) -> object:
    """Choose at random; the same for a seed, whichever tests run."""
    chosen = random.Random(f"{SEED} {fault}").choice(choices)
    print(f"seed {SEED}: {fault}: {chosen}")
    return chosen


def rdma(node: str) -> str:
    return node.rstrip("0123456789") + "0"


NODES = ["ib1", "ib2", "roce1", "roce2"]  # where a run of two and two lands on an idle testbed


class Trial:
    """A run that has been started."""

    def __init__(self, runs: Path, name: str, *overrides: str, **environment: str) -> None:
        self.run = RunDirectory(runs / name)
        self.process = subprocess.Popen(
            [HOLMES, "run", f"name={name}", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOLMES_RUNS": str(runs), "COLUMNS": "1000", **environment},
        )
        self.out = ""

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"it ended: {self.process.communicate()[0]}")
            if time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"not within {seconds} s: {self.texts()}")
            time.sleep(0.2)

    def started(self) -> None:
        self.wait_for(lambda: self.run.log_path(0).exists(), 90)

    def stepped(self, steps: int = 3) -> None:
        self.wait_for(lambda: self.run.exists() and len(self.run.metrics()) >= steps, 120)

    def end(self) -> int:
        """Its exit code, within the time allowed."""
        try:
            self.out = self.process.communicate(timeout=IN_TIME_S)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            subprocess.run([HOLMES, "cancel", str(self.run.path)], capture_output=True, check=False)
            pytest.fail(f"no end within {IN_TIME_S} s: {self.texts()}")
        return self.process.returncode

    def texts(self) -> set[str]:
        """Return the errors in all logs, without those that another rank's failure caused."""
        found = set()
        for log in sorted((self.run.path / "logs").glob("rank-*.txt")):
            for line in log.read_text(encoding="utf-8").splitlines():
                match = re.match(r"[\d-]+ [\d:.]+ (failed: .*|error: .*|warning: .*)", line)
                if match and "Connection " not in line:
                    found.add(match[1].removeprefix("failed: "))
        return found

    def errors(self) -> list[str]:
        """Of those, the errors: a long run on a busy machine may find a straggler, too."""
        return [text for text in self.texts() if text.startswith("error: ")]

    def one_line(self) -> str:
        texts = self.texts()
        assert len(texts) == 1, texts
        return texts.pop()

    def stopped(self) -> str:
        """Return the one line of a run that the fault ended. `holmes run` shows it too, and the record keeps it."""
        code = self.end()
        line = self.one_line()
        assert code == 1, self.out
        assert line in self.out, (line, self.out)
        result = self.run.read_result()
        assert result is not None and (result["state"], result["error"]) == ("failed", line), result
        return line


def must(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"


@contextlib.contextmanager
def broken(testbed, node: str, do: list[str], undo: list[str]) -> Iterator[None]:
    """Make a fault on a node while the block runs. One command a line."""
    try:
        for command in do:
            must(testbed.exec(node, *command.split()))
        yield
    finally:
        for command in undo:
            must(testbed.exec(node, *command.split()))


def down(testbed, node: str, nic: str):
    return broken(testbed, node, [f"ip link set {nic} down"], [f"ip link set {nic} up"])


def shaped(testbed, node: str, share: float):
    nic, mbit = rdma(node), MBIT[node.rstrip("0123456789")]
    return broken(testbed, node, [f"tc {tbf_line(nic, share * mbit)}"], [f"tc {tbf_line(nic, mbit)}"])


def features(testbed, node: str) -> str:
    return re.search(r"AvailableFeatures=(\S+)", testbed.run("scontrol", "-o", "show", "node", node).stdout)[1]


@contextlib.contextmanager
def lying(testbed, members: list[str], others: list[str]) -> Iterator[None]:
    """Let the site declare `members`, and no others, as the InfiniBand fabric ib-a, in one partition."""
    before = {node: features(testbed, node) for node in testbed.nodes}

    def write(node: str, names: str) -> None:
        must(
            testbed.run(
                "scontrol", "update", f"nodename={node}", f"availablefeatures={names}", f"activefeatures={names}"
            )
        )

    try:
        must(testbed.run("scontrol", "create", "partitionname=all", f"nodes={','.join(testbed.nodes)}"))
        for node in members:
            write(node, re.sub("fabric_[^,]+", "fabric_ib-a", before[node].replace("nic_roce", "nic_ib")))
        for node in others:
            write(node, re.sub("fabric_[^,]+", "fabric_other", before[node]))
        yield
    finally:
        for node, names in before.items():
            write(node, names)
        must(testbed.run("scontrol", "delete", "partitionname=all"))


def address(testbed, node: str, nic: str) -> str:
    return re.search(r"inet ([\d.]+)", testbed.exec(node, "ip", "-4", "addr", "show", nic).stdout)[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("runs")
    if SEED == USUAL_SEED and len(ROWS) == FAULTS:
        PAGE.write_text(page(), encoding="utf-8")


def note(fault: str, happens: str, line: str) -> None:
    ROWS[fault] = happens, line


def test_a_healthy_run_says_nothing_and_its_counters_match_the_plan(testbed, runs) -> None:
    trial = Trial(runs, "healthy", *HYBRID, "train.steps=13", "train.openmetrics=live.prom")
    trial.started()
    assert trial.end() == 0, trial.out
    assert trial.texts() == set()
    plan, record = Plan.read(trial.run.plan_path), trial.run.read_run()
    factors, steps = record["traffic"]["header_factors"], [m for m in trial.run.metrics() if m["step"] > 1]
    assert sorted(record["hosts"]) == NODES
    for kind, planned in plan.predicted.nic_bytes_per_step.items():
        counted = sum(m["nic_bytes"][kind]["tx"] for m in steps) / len(steps) / factors[kind]
        assert counted == pytest.approx(planned, rel=0.05), kind
    live = (trial.run.path / "live.prom").read_text()
    for a, b in (("ib-a", "roce-a"), ("roce-a", "ib-a")):
        counted, planned = (
            float(re.search(rf'holmes_fabric_{name}_total{{run="healthy",sender="{a}",receiver="{b}"}} (.*)', live)[1])
            for name in ("bytes", "planned_bytes")
        )
        assert counted == sum(m["fabric_bytes"][a][b] for m in trial.run.metrics()) == pytest.approx(planned, rel=0.05)
    logs = [
        [json.loads(line) for line in (trial.run.nics / f"{node}.jsonl").read_text().splitlines()] for node in NODES
    ]
    assert all([line["step"] for line in log] == list(range(1, 14)) for log in logs)
    for step in steps:
        sums = [log[step["step"] - 1]["nics"]["eth0"] for log in logs]
        assert step["nic_bytes"]["ethernet"] == {way: sum(nic[way] for nic in sums) for way in ("tx", "rx")}
    used = {(g["kind"], *g["ranks"]): g["interfaces"] for g in record["nics"]}
    fabrics = [{"ib0": "ib[1-2]"}, {"roce0": "roce[1-2]"}]
    ranks = [tuple(r for r, host in enumerate(record["hosts"]) if host.startswith(kind)) for kind in ("ib", "roce")]
    assert [used[next(g for g in used if g[1:] == members)] for members in ranks] == fabrics


@pytest.mark.parametrize("kind", ["RDMA", "Ethernet"])
def test_nic_down_before_the_start(testbed, runs, kind) -> None:
    node = draw(f"{kind} down before the start", NODES)
    nic = rdma(node) if kind == "RDMA" else "eth0"
    with down(testbed, node, nic):
        trial = Trial(runs, f"down-{kind}", *HYBRID)
        trial.started()
        line = trial.stopped()
    for word in (f"node {node}", f"interface {nic} is down", f"ip link set {nic} up"):
        assert word in line
    note(f"{kind} NIC down before the start", "stops", line)


@pytest.mark.parametrize("kind", ["RDMA", "Ethernet"])
def test_nic_down_in_mid_run(testbed, runs, kind) -> None:
    node = draw(f"{kind} down in mid-run", NODES)
    nic = rdma(node) if kind == "RDMA" else "eth0"
    trial = Trial(runs, f"mid-{kind}", *HYBRID, "train.steps=2000")
    trial.stepped()
    with down(testbed, node, nic):
        line = trial.stopped()
    for word in (f"node {node}", f"NIC {nic} went down", "bring it up"):
        assert word in line
    note(f"{kind} NIC down in mid-run", "stops", line)


@pytest.mark.parametrize("part", ["RDMA NIC", "Node"])
def test_silence_in_mid_run(testbed, runs, part) -> None:
    """No link goes down and no process ends. Without a watch the ranks would wait for train.net_timeout_s."""
    node = draw(f"{part} silent in mid-run", NODES)
    nics = [rdma(node)] if part == "RDMA NIC" else []
    trial = Trial(runs, f"silent-{part.split()[0]}", *HYBRID, "train.steps=2000")
    trial.stepped()
    with silent(node, *nics):
        start = time.monotonic()
        peer = NODES[NODES.index(node) ^ 1]  # the other node of its fabric
        watcher = peer if part == "RDMA NIC" else NODES[NODES.index(node) - 1]
        log = trial.run.log_path(NODES.index(watcher))
        trial.wait_for(lambda: f"node {node} has not answered for 4 s over " in log.read_text(), 30)
        seconds = time.monotonic() - start
        assert trial.end() == 1, trial.out
    assert seconds < 6.5, seconds
    line = next(t for t in sorted(trial.texts()) if f"node {node} has not answered" in t)
    for word in (f"node {watcher}: ", f"check that {node} runs"):
        assert word in line
    note(f"{part} silent in mid-run", "stops within 7 s", line)


@pytest.mark.parametrize(("percent", "stops"), [(30, False), (5, True)])
def test_slow_rdma_nic(testbed, runs, percent, stops) -> None:
    node = draw(f"shaped to {percent}%", [f"{kind}{n}" for kind in MBIT for n in (1, 2, 3)])
    fabric = node.rstrip("0123456789") + "-a"
    with shaped(testbed, node, percent / 100):
        trial = Trial(runs, f"slow{percent}", *ONE_FABRIC.format(fabric, 3).split("|"))
        trial.started()
        if stops:
            line = trial.stopped()
        else:
            assert trial.end() == 0, trial.out
            line = trial.one_line()
    assert line.startswith("warning: ") != stops
    for word in (f"node {node}", f"NIC {rdma(node)}", "ethtool"):
        assert word in line
    measured = int(re.search(r"\((\d+)%", line)[1])
    assert percent * 0.6 < measured < percent * 1.4
    note(f"RDMA NIC at {percent}% of its rate", "stops" if stops else "continues, with a warning", line)


def test_ethernet_that_becomes_slow_under_a_pipeline_edge(testbed, runs) -> None:
    node = draw("Ethernet at 5%", NODES)
    trial = Trial(runs, "slow-edge", *HYBRID, "train.steps=2000")
    trial.stepped(6)
    with broken(testbed, node, [f"tc {tbf_line('eth0', 2.5)}"], [f"tc {tbf_line('eth0', 50)}"]):
        slowed = len(trial.run.metrics())
        trial.wait_for(lambda: bool(trial.texts()), IN_TIME_S)
        must(subprocess.run([HOLMES, "cancel", str(trial.run.path)], capture_output=True, text=True, check=False))
        trial.end()
    line = trial.one_line()
    match = re.match(rf"warning: nodes \w+ and \w+: Ethernet from eth0 [\d.]+ of {node} to eth0 [\d.]+ of (\w+) ", line)
    assert match and match[1].rstrip("12") != node.rstrip("12") and "of 50 Mb/s" in line, line
    assert 3 < int(re.search(r"\((\d+)%", line)[1]) < 7, line
    before = trial.run.log_path(0).read_text(encoding="utf-8").partition("warning: ")[0]
    assert int(re.findall(r"step (\d+)/", before)[-1]) <= slowed + 10
    note("Ethernet NIC under a pipeline edge at 5%, in mid-run", "continues, with a warning", line)


def test_roce_node_labelled_ib(testbed, runs) -> None:
    node = draw("a RoCE node labelled IB", ["roce1", "roce2", "roce3"])
    with lying(testbed, ["ib1", "ib2", node], ["ib3", "ib4"]):
        trial = Trial(runs, "lie", *ONE_FABRIC.format("ib-a", 3).split("|"))
        trial.started()
        line = trial.stopped()
    for word in (f"node {node}", "no ib interface among", "roce0", "holmes label"):
        assert word in line
    note("RoCE node labelled as InfiniBand", "stops", line)


def test_renamed_ethernet_nic(testbed, runs) -> None:
    node = draw("Ethernet NIC renamed", NODES)
    rename = "ip link set {0} down|ip link set {0} name {1}|ip link set {1} up"
    with broken(testbed, node, rename.format("eth0", "net7").split("|"), rename.format("net7", "eth0").split("|")):
        trial = Trial(runs, "renamed", *HYBRID, "train.steps=3")
        trial.started()
        assert trial.end() == 0, trial.out
        line = trial.one_line()
    for word in ("warning", f"node {node}", "net7", "rename it to eth0"):
        assert word in line
    note("Ethernet NIC renamed", "continues, with a warning", line)


@pytest.mark.parametrize("kind", ["RDMA", "Ethernet"])
def test_firewall_between_two_nodes(testbed, runs, kind) -> None:
    pairs = (
        [("ib1", "ib2"), ("ib2", "ib1"), ("roce1", "roce2"), ("roce2", "roce1")]
        if kind == "RDMA"
        else [("ib1", "roce1"), ("roce2", "ib1"), ("roce1", "ib1"), ("roce2", "ib2"), ("ib2", "ib1")]
    )
    node, other = draw(f"firewall, {kind}", pairs)
    nic = rdma(node) if kind == "RDMA" else "eth0"
    peer = address(testbed, other, rdma(other) if kind == "RDMA" else "eth0")
    with contextlib.suppress(TestbedError):  # where there is no apt
        packages.install({"nft": ("nftables",)}, print)
    if shutil.which("nft"):
        do = [
            "nft add table ip faults",
            "nft add chain ip faults in { type filter hook input priority 0 ; }",
            f"nft add rule ip faults in ip saddr {peer} drop",
        ]
        undo = ["nft delete table ip faults"]
    else:  # the same silence: frames to an address that nobody has
        do = [f"ip neigh replace {peer} lladdr 02:00:00:00:00:01 dev {nic} nud permanent"]
        undo = [f"ip neigh del {peer} dev {nic}"]
    with broken(testbed, node, do, undo):
        trial = Trial(runs, f"firewall-{kind}", *HYBRID)
        trial.started()
        line = trial.stopped()
    for word in (node, other, nic, "firewall"):
        assert word in line
    note(f"Firewall between two nodes' {kind} NICs", "stops", line)


@pytest.mark.parametrize(
    ("name", "value"),
    [("GLOO_SOCKET_IFNAME", "mgmt0"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")],
)
def test_variable_that_overrides_the_choice(testbed, runs, name, value) -> None:
    trial = Trial(runs, f"variable-{name}", *HYBRID, **{name: value})
    trial.started()
    assert trial.end() == 1, trial.out
    line = trial.run.read_result()["error"]
    assert line in trial.out
    said = {re.sub(r"NIC \w+", "NIC", text.partition(": ")[2]) for text in trial.texts()}
    assert len(said) == 1  # each node's own
    node = trial.run.read_result()["failed_node"]
    meant = "eth0" if name.endswith("IFNAME") else f"NIC {rdma(node)}"
    for word in (f"node {node}", f"{name}={value}", f"unset {name}", meant):
        assert word in line or word.replace("unset ", "unset it (") in line
    note(f"{name} set in the environment", "stops", line)


@contextlib.contextmanager
def wrong_route(testbed, node: str, other: str) -> Iterator[None]:
    """Send a node's RDMA traffic out of its Ethernet NIC: connections work, only counters can tell."""
    peer = address(testbed, other, rdma(other))
    with broken(
        testbed,
        node,
        [f"ip route add {peer}/32 dev eth0 src {address(testbed, node, rdma(node))}"],
        [f"ip route del {peer}/32 dev eth0"],
    ):
        yield


def names_the_route(trial: Trial, node: str, other: str) -> str:
    (line,) = trial.errors()
    ranks = [r for r, host in enumerate(trial.run.read_run()["hosts"]) if host in (node, other)]
    for word in (
        f"node {node}",
        "NIC eth0 sent",
        f"probably group dp of ranks {ranks[0]},{ranks[1]}",
        f"see that the {node.rstrip('12')} NIC",
    ):
        assert word in line
    return line


PAIRS = [("ib1", "ib2"), ("ib2", "ib1"), ("roce1", "roce2"), ("roce2", "roce1")]


def test_traffic_on_the_wrong_nic(testbed, runs) -> None:
    node, other = draw("wrong route", PAIRS)
    with wrong_route(testbed, node, other):
        trial = Trial(runs, "route", *HYBRID, "train.steps=14")
        trial.started()
        assert trial.end() == 0, trial.out
    note(
        "Route over the wrong NIC", "continues, with an error line within 20 steps", names_the_route(trial, node, other)
    )
    nics = [json.loads(line)["nics"] for line in (trial.run.nics / f"{node}.jsonl").read_text().splitlines()]
    assert len(nics) == 14 and all(step["eth0"]["tx"] > 10 * step.get(rdma(node), {"tx": 0})["tx"] for step in nics)


def test_traffic_that_moves_to_the_wrong_nic_in_mid_run(testbed, runs) -> None:
    node, other = draw("wrong route in mid-run", PAIRS)
    trial = Trial(runs, "moved", *HYBRID, "train.steps=2000")
    trial.stepped(draw("mid-run", [30, 35]))
    with wrong_route(testbed, node, other):
        moved = len(trial.run.metrics())
        trial.wait_for(lambda: bool(trial.errors()), IN_TIME_S)
        must(subprocess.run([HOLMES, "cancel", str(trial.run.path)], capture_output=True, text=True, check=False))
        trial.end()
    names_the_route(trial, node, other)
    before = trial.run.log_path(0).read_text(encoding="utf-8").partition("error: ")[0]
    assert int(re.findall(r"step (\d+)/", before)[-1]) < moved + 20


def test_two_ib_fabrics_with_one_label(testbed, runs, monkeypatch) -> None:
    from holmes_hpc import testbed as beds

    monkeypatch.setenv("HOLMES_TESTBED", f"/var/lib/holmes-faults-{os.getpid()}")
    try:
        beds.up(
            Path(__file__).parents[2] / "slurm" / "testbed" / "two-ib.yaml",
            release=os.environ.get("HOLMES_TESTBED_RELEASE"),
            progress=lambda line: None,
        )
        for key, value in beds.env().items():
            monkeypatch.setenv(key, value)
        two = type(testbed)(beds.env(), beds.nodes())
        with lying(two, ["iba1", "iba2", "ibb1", "ibb2"], ["iba3", "iba4", "ibb3", "ibb4"]):
            trial = Trial(runs, "two", *ONE_FABRIC.format("ib-a", 4).split("|"))
            trial.started()
            line = trial.stopped()
    finally:
        beds.down(lambda line: None)
    for word in ("fabric ib-a", "iba[1-2]", "ibb[1-2]", "ib0", "give them different fabric_ features"):
        assert word in line
    note("Two InfiniBand fabrics with one label", "stops", line)


FAULTS = 19


def page() -> str:
    """Return docs/nics.md with a new table of faults, without hints and what differs between equal runs (addresses,
    rates)."""
    lines = ["| Fault | The run | Message, without its hint |", "|---|---|---|"]
    for fault, (happens, line) in sorted(ROWS.items()):
        text = re.sub(r" \([^()]*;[^()]*\)", "", line).partition("; ")[0]
        text = re.sub(r"\b\d+(\.\d+){3}(:\d+)?\b", "ADDRESS", text)
        text = re.sub(r"[\d.]+ ([GM]b/s of)", r"… \1", text)
        text = re.sub(r"[\d.]+ MB", "… MB", text)
        lines.append(f"| {fault} | {happens} | `` {text} `` |")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1]
