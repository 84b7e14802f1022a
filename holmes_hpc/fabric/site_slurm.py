"""The Site that Slurm shows: its nodes, grouped into fabrics."""

from __future__ import annotations

from holmes_hpc.fabric.listing import listing
from holmes_hpc.fabric.partitions import NodeSettings
from holmes_hpc.fabric.site import Site


def read_site(settings: NodeSettings | None = None) -> Site:
    """Return the Site that Slurm shows now. SiteError without Slurm, or if no node can be used."""
    shown = listing(settings)
    return shown.grouping.site(shown.cluster)
