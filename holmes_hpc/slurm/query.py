"""Asking Slurm: its nodes, partitions, configuration, and the Site made of them."""

from __future__ import annotations

import subprocess

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.grouping import NodeSettings, group
from holmes_hpc.fabric.site import Site
from holmes_hpc.slurm.scontrol import Config, Node, Partition, lines, parse_config, parse_node, parse_partition

__all__ = ["NodeSettings", "answers", "command", "read_config", "read_node", "read_nodes", "read_partitions",
           "read_site"]

TIMEOUT_S = 30


def command(*words: str) -> str:
    """The output of a Slurm client command; a SiteError where there is none or Slurm does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as e:
        raise SiteError(f"no command {words[0]}", where="Slurm",
                        hint="load Slurm's client commands; `holmes plan --site FILE` needs none") from e
    except subprocess.TimeoutExpired as e:
        raise SiteError(f"no answer to {' '.join(words)} in {TIMEOUT_S} s", where="Slurm",
                        hint="see that slurmctld runs (scontrol ping)") from e
    if done.returncode:
        text = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SiteError(text, where=" ".join(words),
                        hint="see that slurmctld runs (scontrol ping) and that SLURM_CONF is right")
    return done.stdout


def answers(*words: str, timeout_s: float) -> tuple[str, str]:
    """What a command printed, whatever became of it; and what went wrong, empty where nothing did. For commands that
    ask many nodes, of which some may fail."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except OSError as e:
        return "", f"{words[0]}: {e.strerror}"
    except subprocess.TimeoutExpired as e:
        return (e.stdout or b"").decode(errors="replace"), f"no answer in {timeout_s:.0f} s"
    if not done.returncode:
        return done.stdout, ""
    return done.stdout, (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]


def read_nodes(vocabulary: str | None = None) -> list[Node]:
    """All nodes of this Slurm, usable or not, in its order. `vocabulary`: the site's own file of features."""
    return [parse_node(line, vocabulary) for line in lines(command("scontrol", "show", "node", "-o"), "NodeName=")]


def read_node(name: str, vocabulary: str | None = None) -> Node | None:
    """One node, None where Slurm does not know it."""
    return next((n for n in read_nodes(vocabulary) if n.name == name), None)


def read_partitions() -> list[Partition]:
    return [parse_partition(line) for line in lines(command("scontrol", "show", "partition", "-o"), "PartitionName=")]


def read_config() -> Config:
    return parse_config(command("scontrol", "show", "config"))


def read_site(settings: NodeSettings | None = None) -> Site:
    """The Site that Slurm shows now. Raises SiteError without Slurm, or where no node can be used."""
    vocabulary = settings.vocabulary if settings else None
    found = group(read_nodes(vocabulary), read_partitions(), read_vocabulary(vocabulary), settings)
    return found.site(read_config().cluster)
