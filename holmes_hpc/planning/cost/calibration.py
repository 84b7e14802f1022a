"""What was measured on real nodes: by `holmes calibrate`, fabric by fabric (the record that it writes and the planner
reads), and by a site's own runs (corrections of all figures)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import Fabric, FabricLink, Gpu, Site
from holmes_hpc.planning.cost.flops import layer_flops
from holmes_hpc.planning.cost.hardware import Link
from holmes_hpc.schema import Checked, check, key, keys, make, refuse

NETWORKS = ("local", *map(str, NicType))
COLLECTIVES = ("reduce_scatter", "all_gather")
LINKS = (*NETWORKS, *(f"{network}.{what}" for network in NETWORKS for what in COLLECTIVES))


@dataclass(frozen=True)
class Measured:
    """Seconds of one part of a model for one micro-batch of `tokens` tokens, on one of `tp` ranks, tensor parallel's
    collectives included.

    `part`: layer, embedding or head. `flops`: the part's forward FLOPs (for the embedding: tokens * hidden), as
    cost/flops.py gives them for the whole micro-batch. `sequence` 0: not known, an earlier release measured. Backward:
    without recomputation.
    """

    part: Annotated[str, key("of a model", one_of=("layer", "embedding", "head"))]
    hidden: Annotated[int, key("width of the residual stream", ge=1)]
    tokens: Annotated[int, key("of a micro-batch", ge=1)]
    tp: Annotated[int, key("tensor parallel", ge=1)]
    flops: Annotated[float, key("forward, of the whole micro-batch", gt=0)]
    forward_s: Annotated[float, key("seconds of a forward pass", unit="s", ge=0, le=1e4)]
    backward_s: Annotated[float, key("seconds of a backward pass", unit="s", ge=0, le=1e4)]
    sequence: Annotated[int, key("tokens of a sequence; 0: not known", ge=0)] = 0
    sequence_parallel: Annotated[bool, key("norms and residuals are shared out over TP")] = False

    def __post_init__(self) -> None:
        check(self, "calibration")
        if self.sequence and self.tokens % self.sequence:
            raise ConfigError(
                f"{self.tokens} tokens are no whole number of sequences of {self.sequence}",
                where="calibration",
                hint="give the tokens of a micro-batch",
            )


@dataclass(frozen=True)
class MeasuredFabric:
    """What was measured on the nodes of one fabric. `fabric`, `gpu`: as the site has them; empty: of any. `links`: ib,
    roce, ethernet, local for messages, and `ib.reduce_scatter`, `ib.all_gather` and so on for the collectives over
    them. What is None was not measured: `optimizer_s` of a parameter that a rank updates, `pass_s` of every pass of a
    stage, beyond its parts."""

    fabric: Annotated[str, key("of the site; empty: any")] = ""
    gpu: Annotated[str, key("its kind of GPU, as the site names it; empty: see device")] = ""
    device: Annotated[str, key("the GPU as its driver names it, or cpu")] = ""
    parts: tuple[Measured, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)
    optimizer_s: Annotated[float | None, key("of one parameter", unit="s", ge=0, le=1)] = None
    pass_s: Annotated[float | None, key("of every pass", unit="s", ge=0, le=1e4)] = None

    def __post_init__(self) -> None:
        check(self, "calibration")
        unknown = [str(name) for name in self.links if name not in LINKS]
        refuse("calibration.links", *((True, f"unknown link {name!r}", nearest(name, LINKS)) for name in unknown))

    def on(self, gpu: Gpu) -> bool:
        """Whether its GPUs are of this kind: as the site names it, or as the vocabulary reads the device's name."""
        if gpu.name == self.gpu or not (self.gpu or self.device):
            return True
        own, other = _kind(self.gpu) or _kind(self.device), _kind(gpu.name) or gpu.name
        return own == other or (not own and not self.gpu and not gpu.is_cpu)

    def of(self, part: str, hidden: int) -> list[Measured]:
        """The measurements of `part`, of the width nearest to `hidden`."""
        rows = [p for p in self.parts if p.part == part]
        width = min((p.hidden for p in rows), key=lambda h: (_apart(h, hidden), h), default=0)
        return [p for p in rows if p.hidden == width]


@dataclass(frozen=True)
class Calibration(Checked, where="calibration"):
    """`between`: rate and delay between fabrics, as a site file's `links:` say them. `pace_layer_ms`: layers waited
    that long. `step_s`: seconds of every step that belong to none of its passes and none of its traffic."""

    fabrics: tuple[MeasuredFabric, ...] = ()
    between: tuple[FabricLink, ...] = ()
    pace_layer_ms: Annotated[float | None, key("layers waited that long", unit="ms", gt=0)] = None
    step_s: Annotated[float | None, key("of every step", unit="s", ge=0, le=1e4)] = None
    dtype: Annotated[str | None, key("of weights", one_of=("fp32", "bf16", "fp16"))] = None
    made: str = ""  # when and where, for people

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """From plain data (a file's content), also as earlier releases wrote it: all GPUs together. ConfigError that
        names the key, its value and what is allowed."""
        if not isinstance(data, Mapping) or "fabrics" in data:
            return make(cls, data, "calibration")
        own = {name: value for name, value in data.items() if name in keys(cls)}
        rest = {name: value for name, value in data.items() if name not in own}
        made = make(cls, own, "calibration")
        return replace(made, fabrics=(make(MeasuredFabric, rest, "calibration"),)) if rest else made

    def to_dict(self) -> dict[str, Any]:
        """Plain data, accepted back by :meth:`from_dict`."""
        return {
            **asdict(self),
            "fabrics": [
                {
                    **asdict(f),
                    "links": {k: asdict(v) for k, v in f.links.items()},
                    "parts": [asdict(p) for p in f.parts],
                }
                for f in self.fabrics
            ],
            "between": [{**asdict(b), "between": list(b.between)} for b in self.between],
        }

    def of(self, fabric: Fabric) -> MeasuredFabric | None:
        """What was measured on `fabric`, else on another with GPUs of its kind; None: on none."""
        return next(self._near(fabric), None)

    def parts(self, fabric: Fabric, part: str, hidden: int) -> list[Measured]:
        """Measurements of `part` on `fabric`, else on another with GPUs of its kind (not every fabric holds the
        embedding), of the width nearest to `hidden`."""
        return next((rows for m in self._near(fabric) if (rows := m.of(part, hidden))), [])

    def _near(self, fabric: Fabric) -> Iterator[MeasuredFabric]:
        """Those with GPUs of the fabric's kind, the fabric itself first."""
        same = [m for m in self.fabrics if m.on(fabric.gpu)]
        yield from (m for m in same if m.fabric == fabric.name)
        yield from (m for m in same if m.fabric != fabric.name)

    def link(self, fabric: Fabric, network: str, collective: str = "") -> Link | None:
        """What `network` reaches on `fabric`, in messages or a collective: as measured there, else with GPUs of its
        kind, else, unless it is inside a node, on any."""
        near = list(self._near(fabric))
        if network != "local":
            near += [m for m in self.fabrics if m not in near]
        return next(
            (m.links[name] for name in (f"{network}.{collective}", network) for m in near if name in m.links), None
        )

    def on(self, site: Site) -> Site:
        """`site` with what was measured between its fabrics, which goes before what it says itself; it says so where
        the two are far apart."""
        names, links = {f.name for f in site.fabrics}, {frozenset(link.between): link for link in site.links}
        found = {frozenset(b.between): b for b in self.between if names.issuperset(b.between)}
        if all(links.get(pair) == link for pair, link in found.items()):
            return site
        said = [
            f"between {' and '.join(b.between)} {_words(b)}, as measured; the site says {_words(links[pair])}"
            for pair, b in found.items()
            if pair in links and _differ(b, links[pair])
        ]
        return replace(site, links=tuple({**links, **found}.values()), assumptions=(*site.assumptions, *said))

    def refuse_other_settings(self, pace_layer_ms: float | None, dtype: str | None) -> None:
        """Raise ConfigError where layers were measured at another pace, or with another type than `dtype`, if given."""
        if not any(f.parts for f in self.fabrics):
            return
        refuse(
            "calibration",
            (
                self.pace_layer_ms != pace_layer_ms,
                f"measured with {_pace(self.pace_layer_ms)}, used for {_pace(pace_layer_ms)}",
                f"set train.pace_layer_ms={self.pace_layer_ms or 'null'} (predict: --pace-layer-ms), or"
                f" calibrate again with {_pace(pace_layer_ms)}",
            ),
            (
                dtype and self.dtype and dtype != self.dtype,
                f"measured with {self.dtype}, used for {dtype}",
                f"set train.dtype={self.dtype}, or calibrate again",
            ),
        )

    def refuse_other_models(self, model: ModelSpec) -> None:
        """Raise ConfigError where layers of another shape than `model`'s were measured. Paced ones have no shape."""
        layers = [p for f in self.fabrics for p in f.parts if p.part == "layer"]
        if self.pace_layer_ms is not None or not layers or any(_is_of(p, model) for p in layers):
            return
        widths = ", ".join(str(h) for h in sorted({p.hidden for p in layers}))
        other = f"of width {widths}" if model.hidden not in {p.hidden for p in layers} else "with other FLOPs"
        raise ConfigError(
            f"it was measured for layers {other}, {model.name}'s are {model.hidden} wide",
            where="calibration",
            hint=f"measure this model: `holmes calibrate model={model.name}`",
        )


@dataclass(frozen=True)
class Corrections(Checked, where="corrections"):
    """What a site's own runs say of the planner's figures. `compute`: how many times as long layers, embedding and head
    take on a kind of GPU. `rates`: how many times the rate a network reaches (ib, roce, ethernet). `notes`: what they
    were learned from, for a plan's assumptions."""

    compute: Annotated[Mapping[str, float], key("of seconds, by GPU kind", gt=0)] = field(default_factory=dict)
    rates: Annotated[Mapping[str, float], key("of rates, by network", gt=0)] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NONE = Corrections()


def _is_of(p: Measured, model: ModelSpec) -> bool:
    """Return whether a measured layer can be one of `model`: its width, and its FLOPs to the percent."""
    alike = not p.sequence or abs(p.flops / layer_flops(model, p.tokens, p.sequence) - 1) < 0.01
    return p.hidden == model.hidden and alike


def interpolated(rows: Sequence[tuple[tuple[float, ...], float]], at: tuple[float, ...]) -> float:
    """Of rows (coordinates, value): the value at `at`, linear in the logarithm of one coordinate after the other; what
    is beyond the rows has the nearest one's."""
    if not at:
        return sum(value for _, value in rows) / len(rows)
    known = sorted({c[0] for c, _ in rows})
    low = max((k for k in known if k <= at[0]), default=known[0])
    high = min((k for k in known if k >= at[0]), default=known[-1])
    ends = [interpolated([(c[1:], v) for c, v in rows if c[0] == end], at[1:]) for end in (low, high)]
    share = math.log(at[0] / low) / math.log(high / low) if low < high else 0.0
    return ends[0] + share * (ends[1] - ends[0])


def _kind(name: str) -> str:
    """The kind of GPU that a name means; empty where nobody knows."""
    found = read_vocabulary().gpu(name)
    return "cpu" if name == "cpu" else found.name if found else ""


def _words(link: FabricLink) -> str:
    return " and ".join([f"{link.gbps:g} Gb/s"] * (link.gbps is not None) + [f"{link.delay_ms:g} ms"])


def _differ(measured: FabricLink, said: FabricLink) -> bool:
    """By more than a fifth in rate, or in delay, where that is more than a millisecond."""
    rates = measured.gbps is not None and said.gbps is not None and abs(measured.gbps / said.gbps - 1) > 0.2
    apart = abs(measured.delay_ms - said.delay_ms)
    return rates or apart > max(1.0, 0.2 * said.delay_ms)


def _apart(a: int, b: int) -> float:
    return max(a, b) / min(a, b)


def _pace(layer_ms: float | None) -> str:
    return f"layers paced to {layer_ms:g} ms" if layer_ms else "layers not paced"
