"""The Site that Slurm shows: its nodes, grouped into fabrics."""

from __future__ import annotations

from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.grouping import NodeSettings, group
from holmes_hpc.fabric.nodes import read_nodes
from holmes_hpc.fabric.partitions import with_associations
from holmes_hpc.fabric.site import Site
from holmes_hpc.slurm.scontrol import read_config, read_partitions


def read_site(settings: NodeSettings | None = None) -> Site:
    """Return the Site that Slurm shows now. SiteError without Slurm, or if no node can be used."""
    partitions = read_partitions()
    settings = with_associations(settings, partitions)
    nodes = read_nodes(settings.vocabulary)
    grouping = group(nodes, partitions, read_vocabulary(settings.vocabulary), settings)
    return grouping.site(read_config().cluster)
