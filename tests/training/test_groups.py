"""NCCL's options of a group. torch's CPU build has no ProcessGroupNCCL: there the decision is tested with a stand-in,
and that NCCL takes it is not shown."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_hpc.fabric.site import NicType
from holmes_hpc.fabric.transport import LOCAL, TCP, Transport
from holmes_hpc.training.groups import nccl_options

NAMES = [(TCP, "Socket"), (Transport("rdma", NicType.IB, "a"), "IB"), (Transport("rdma", NicType.ROCE, "b"), "IB")]


def test_options_are_fresh_and_name_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(net_name=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    for transport, name in [*NAMES, (LOCAL, None)]:
        one, two = nccl_options(transport), nccl_options(transport)
        assert one.config.net_name == two.config.net_name == name and one is not two and one.config is not two.config


@pytest.mark.skipif(not dist.is_nccl_available(), reason="not shown here: this torch has no ProcessGroupNCCL")
@pytest.mark.parametrize(("transport", "name"), NAMES)
def test_nccl_takes_the_name(transport: Transport, name: str) -> None:
    one, two = nccl_options(transport), nccl_options(transport)
    assert one.config.net_name == name and one is not two
    two.config.net_name = "other"
    assert one.config.net_name == name
