"""The configuration group `elastic`: whether a run continues after the loss of a node, and with how many nodes."""

from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.schema import Checked, key


@dataclass(frozen=True)
class ElasticConfig(Checked, where="elastic", dotted=True):
    """The configuration group `elastic`: a job that survives the loss of a node."""

    enabled: Annotated[bool, key("continue on the other nodes if a node is lost: `--elastic`")] = False
    spares: Annotated[int, key("spare nodes of each component", ge=0)] = 1
    min_nodes: Annotated[int, key("fewest nodes to continue with", ge=1)] = 1
    members: Annotated[
        bool, key("submit the nodes of each pool as a job of its own: training starts on those that are there")
    ] = False
    min_fabrics: Annotated[int, key("with members: fewest pools to start with", ge=1)] = 1
    copy_every: Annotated[
        int | None,
        key(
            "steps between copies of the state in the memory of two nodes; null: at most 1% of the time; 0: none", ge=0
        ),
    ] = None
    dead_s: Annotated[float, key("silence after which a node is lost", unit="s", ge=1)] = 3.0
