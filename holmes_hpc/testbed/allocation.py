"""What a new testbed takes of the machine: names, a subnet, ports."""

from __future__ import annotations

import hashlib
import secrets
from ipaddress import ip_network
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.ports import free_port
from holmes_hpc.testbed import network
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.record import Record
from holmes_hpc.testbed.topology import Topology


def new_record(directory: Path, shape: Topology, text: str, release: str, made: bool) -> Record:
    """Return the record of a testbed to be made in `directory`, with names, a subnet and ports that nobody uses."""
    taken = network.names_in_use()
    start = int(hashlib.sha256(str(directory).encode()).hexdigest()[:4], 16)
    prefixes = (f"hb{(start + step) % 65536:04x}" for step in range(65536))
    prefix = next(p for p in prefixes if not any(name == p or name.startswith(f"{p}-") for name in taken))
    subnet = network.free_subnet(prefix)
    wiring = Wiring(shape, prefix, subnet)
    return Record(
        prefix=prefix,
        subnet=subnet,
        ports=_free_ports(subnet),
        password=secrets.token_hex(16),
        release=release,
        topology=text,
        namespaces=wiring.namespaces,
        made_directory=made,
        run_netns=network.run_netns_state(),
    )


def _free_ports(subnet: str) -> dict[str, int]:
    """A port for each daemon, below the ephemeral range; testbeds have unlike subnets and so look in unlike places."""
    start = ip_network(subnet).network_address.packed[1] * 40
    ports = iter([*range(20001 + start, 32001), *range(20000, 20001 + start)])
    found = {}
    for name in ("slurmctld", "slurmdbd", "slurmd", "database"):
        port = free_port(ports, "0.0.0.0")
        if port is None:
            raise TestbedError(
                "no TCP port between 20000 and 32000 is free", where="testbed", hint="end what listens on so many"
            )
        found[name] = port
    return found
