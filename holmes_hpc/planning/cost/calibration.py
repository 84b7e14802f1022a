"""Records of measurements on real nodes.

`holmes calibrate` measures two nodes of each pool and writes a :class:`Calibration`, which the planner reads.
:class:`Corrections` are factors for the planner's figures, fitted to a site's own runs.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import Case, ConfigError, nearest
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import FabricLink, Gpu, Pool, Site
from holmes_hpc.planning.cost.flops import layer_flops
from holmes_hpc.planning.cost.network_figures import Link
from holmes_hpc.schema import Checked, key, keys, make

NETWORKS = ("local", *map(str, NicType))
COLLECTIVES = ("reduce_scatter", "all_gather")
LINKS = (*NETWORKS, *(f"{network}.{collective}" for network in NETWORKS for collective in COLLECTIVES))


@dataclass(frozen=True)
class MeasuredPart(Checked, where="calibration"):
    """The measured times of one part of a model, with TP's collectives, for one micro-batch on one of `tp` ranks.
    `flops`: as in cost/flops.py (for the embedding: tokens * hidden). `sequence`: 0 (unknown) in files of an earlier
    release. `backward_s`: seconds without recomputation."""

    part: Annotated[str, key("part of a model", one_of=("layer", "embedding", "head"))]
    hidden: Annotated[int, key("width of the residual stream", ge=1)]
    tokens: Annotated[int, key("tokens of a micro-batch", ge=1)]
    tp: Annotated[int, key("tensor-parallel size", ge=1)]
    flops: Annotated[float, key("forward FLOPs of the complete micro-batch", gt=0)]
    forward_s: Annotated[float, key("seconds of a forward pass", unit="s", ge=0, le=1e4)]
    backward_s: Annotated[float, key("seconds of a backward pass", unit="s", ge=0, le=1e4)]
    sequence: Annotated[int, key("tokens of a sequence; 0: unknown", ge=0)] = 0
    sequence_parallel: Annotated[bool, key("norms and residuals are split over TP")] = False

    def _mistakes(self) -> Iterator[Case]:
        problem = f"{self.tokens} tokens are not a multiple of the sequence length {self.sequence}"
        yield self.sequence and self.tokens % self.sequence, problem, "give the tokens of a micro-batch"


@dataclass(frozen=True)
class MeasuredPool(Checked, where="calibration"):
    """The measurements on the nodes of one pool. `links`: by network (ib, roce, ethernet, local), for messages; by
    `ib.reduce_scatter`, `ib.all_gather` and so on, for a collective over it. `optimizer_s`: seconds per parameter that
    a rank updates. `pass_s`: fixed seconds of a stage's pass beyond layers, embedding and head. None: not measured."""

    fabric: Annotated[str, key("pool of the site; empty: any")] = ""
    gpu: Annotated[str, key("GPU kind as the site names it; empty: see device")] = ""
    device: Annotated[str, key("GPU as its driver names it, or cpu")] = ""
    parts: tuple[MeasuredPart, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)
    optimizer_s: Annotated[float | None, key("optimizer time of one parameter", unit="s", ge=0, le=1)] = None
    pass_s: Annotated[float | None, key("overhead of every pass", unit="s", ge=0, le=1e4)] = None

    def _mistakes(self) -> Iterator[Case]:
        for name in (str(name) for name in self.links if name not in LINKS):
            yield True, f"unknown link {name!r}", nearest(name, LINKS), "calibration.links"

    def has_gpu(self, gpu: Gpu) -> bool:
        """Return whether the measured GPUs are of the kind of `gpu`. Measurements that name neither `gpu` nor `device`
        match every kind. An unknown `device` matches every kind but CPUs."""
        if gpu.name == self.gpu or not (self.gpu or self.device):
            return True
        measured, site = _gpu_kind(self.gpu) or _gpu_kind(self.device), _gpu_kind(gpu.name) or gpu.name
        return measured == site or (not measured and not self.gpu and not gpu.is_cpu)

    def measurements(self, part: str, hidden: int) -> list[MeasuredPart]:
        """Return the measurements of `part` with the width nearest to `hidden`."""
        rows = [p for p in self.parts if p.part == part]
        nearest_hidden = min((p.hidden for p in rows), key=lambda h: (max(h, hidden) / min(h, hidden), h), default=0)
        return [p for p in rows if p.hidden == nearest_hidden]


@dataclass(frozen=True)
class Calibration(Checked, where="calibration"):
    """All measurements of a site.
    `between`: rate and delay between fabrics, as in a site file's `links:`. `pace_layer_ms`: forward time of a layer
    if the measured run emulated compute. `step_s`: fixed seconds of a step, in addition to its passes and traffic."""

    fabrics: tuple[MeasuredPool, ...] = ()
    between: tuple[FabricLink, ...] = ()
    pace_layer_ms: Annotated[float | None, key("emulated forward time of a layer", unit="ms", gt=0)] = None
    step_s: Annotated[float | None, key("overhead of every step", unit="s", ge=0, le=1e4)] = None
    dtype: Annotated[str | None, key("type of weights", one_of=("fp32", "bf16", "fp16"))] = None
    made: str = ""  # date and place, for people

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Calibration":
        """Return the calibration in `data`, the content of a file.
        A file of an earlier release has one set of measurements for all GPUs; it is accepted, too. For a wrong value,
        ConfigError names the key, its value and the allowed values."""
        if not isinstance(data, Mapping) or "fabrics" in data:
            return make(cls, data, "calibration")
        own_data = {name: value for name, value in data.items() if name in keys(cls)}
        legacy = {name: value for name, value in data.items() if name not in own_data}
        calibration = make(cls, own_data, "calibration")
        return replace(calibration, fabrics=(make(MeasuredPool, legacy, "calibration"),)) if legacy else calibration

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` accepts."""
        data = {**asdict(self), "between": [link.to_dict() for link in self.between]}
        return json.loads(json.dumps(data))  # tuples become lists

    def best_match(self, pool: Pool) -> MeasuredPool | None:
        """Return the measurements on `pool`, else those on a pool with GPUs of the same kind, else None."""
        return next(iter(self._matches(pool)), None)

    def parts(self, pool: Pool, part: str, hidden: int) -> list[MeasuredPart]:
        """Return the measurements of `part` on `pool` whose width is nearest to `hidden`.
        If `pool` has none, as not every pool holds the embedding, use a pool with GPUs of the same kind."""
        return next((rows for m in self._matches(pool) if (rows := m.measurements(part, hidden))), [])

    def _matches(self, pool: Pool) -> list[MeasuredPool]:
        """Return the measurements on GPUs of the pool's kind. Those on the pool itself come first."""
        return sorted((m for m in self.fabrics if m.has_gpu(pool.gpu)), key=lambda m: m.fabric != pool.name)

    def link(self, pool: Pool, network: str, collective: str = "") -> Link | None:
        """Return the measured link of `network`, for messages or for `collective`; None if it was not measured.
        Measurements on `pool` come first, then those on pools with GPUs of the same kind, then those on any pool. For
        links inside a node (``local``), pools with other GPUs are not used."""
        sources = self._matches(pool)
        if network != "local":
            sources += [m for m in self.fabrics if m not in sources]
        names = f"{network}.{collective}", network
        return next((m.links[name] for name in names for m in sources if name in m.links), None)

    def with_measured_links(self, site: Site) -> Site:
        """Return `site` with measured links between its fabrics in place of stated ones; its assumptions note large
        differences. A link keeps its `total_gbps`, which a measurement between two nodes does not give."""
        names, links = {f.name for f in site.pools}, {frozenset(link.between): link for link in site.links}
        measured_links = {
            pair: replace(b, total_gbps=links[pair].total_gbps) if pair in links else b
            for b in self.between
            if names.issuperset(pair := frozenset(b.between))
        }
        if all(links.get(pair) == link for pair, link in measured_links.items()):
            return site
        notes = [
            f"link between {' and '.join(b.between)}: measured {_describe_link(b)}, site says"
            f" {_describe_link(links[pair])}"
            for pair, b in measured_links.items()
            if pair in links and _differ(b, links[pair])
        ]
        return replace(site, links=tuple({**links, **measured_links}.values()), assumptions=(*site.assumptions, *notes))

    def refuse_other_settings(self, pace_layer_ms: float | None, dtype: str | None) -> None:
        """Raise ConfigError if layers were measured with another emulated time or another type of weights."""
        if not any(f.parts for f in self.fabrics):
            return
        problem = f"calibration has {_pace_text(self.pace_layer_ms)}, the run has {_pace_text(pace_layer_ms)}"
        hint = f"set train.pace_layer_ms={self.pace_layer_ms or 'null'} (predict: --pace-layer-ms)"
        hint += f", or calibrate again with {_pace_text(pace_layer_ms)}"
        ConfigError.refuse("calibration", (self.pace_layer_ms != pace_layer_ms, problem, hint))
        problem = f"calibration has dtype={self.dtype}, the run has dtype={dtype}"
        has_other_dtype = dtype and self.dtype and dtype != self.dtype
        hint = f"set train.dtype={self.dtype}, or calibrate again"
        ConfigError.refuse("calibration", (has_other_dtype, problem, hint))

    def refuse_other_models(self, model: ModelSpec) -> None:
        """Raise ConfigError if no measured layer has the shape of the model's layers. Emulated layers have no shape."""
        layers = [p for f in self.fabrics for p in f.parts if p.part == "layer"]
        if self.pace_layer_ms is not None or not layers or any(_is_layer_of(p, model) for p in layers):
            return
        widths = ", ".join(str(h) for h in sorted({p.hidden for p in layers}))
        difference = f"hidden={widths}" if model.hidden not in {p.hidden for p in layers} else "other layer FLOPs"
        problem = f"calibration has {difference}, unlike model {model.name} with hidden={model.hidden}"
        hint = f"calibrate this model: `holmes calibrate model={model.name}`"
        raise ConfigError(problem, where="calibration", hint=hint)


NO_CALIBRATION = Calibration()


@dataclass(frozen=True)
class Corrections(Checked, where="corrections"):
    """Factors for the planner's figures, fitted to a site's own runs.
    `compute`: by GPU kind, the factor of the time of layers, embedding and head. `rates`: by network (ib, roce,
    ethernet), the factor of its data rate. `notes`: texts on the runs behind the factors, for a plan's assumptions."""

    compute: Annotated[Mapping[str, float], key("of compute times, by GPU kind", gt=0)] = field(default_factory=dict)
    rates: Annotated[Mapping[str, float], key("of rates, by network", gt=0)] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NO_CORRECTIONS = Corrections()


def _is_layer_of(part: MeasuredPart, model: ModelSpec) -> bool:
    """Return whether a measured layer can be of `model`: equal width, and FLOPs (if comparable) within 1%."""
    has_equal_flops = not part.sequence or abs(part.flops / layer_flops(model, part.tokens, part.sequence) - 1) < 0.01
    return part.hidden == model.hidden and has_equal_flops


def interpolate(rows: Sequence[tuple[tuple[float, ...], float]], point: tuple[float, ...]) -> float:
    """Interpolate `rows` of (coordinates, value) at `point`, linearly in the logarithm of each coordinate.
    Outside the range of a coordinate, its nearest value is used."""
    if not point:
        return sum(value for _, value in rows) / len(rows)
    coordinates = sorted({c[0] for c, _ in rows})
    low = max((k for k in coordinates if k <= point[0]), default=coordinates[0])
    high = min((k for k in coordinates if k >= point[0]), default=coordinates[-1])
    end_values = [interpolate([(c[1:], v) for c, v in rows if c[0] == end], point[1:]) for end in (low, high)]
    share = math.log(point[0] / low) / math.log(high / low) if low < high else 0.0
    return end_values[0] + share * (end_values[1] - end_values[0])


def _gpu_kind(name: str) -> str:
    """Return the GPU kind that `name` stands for, or an empty text if the name is unknown."""
    gpu = read_vocabulary().gpu(name)
    return "cpu" if name == "cpu" else gpu.name if gpu else ""


def _describe_link(link: FabricLink) -> str:
    return " and ".join([f"{link.gbps:g} Gb/s"] * (link.gbps is not None) + [f"{link.delay_ms:g} ms"])


def _differ(measured: FabricLink, stated: FabricLink) -> bool:
    """Return whether two links differ by over 20% in rate, or by over 20% and 1 ms in delay."""
    rates_differ = measured.gbps is not None and stated.gbps is not None and abs(measured.gbps / stated.gbps - 1) > 0.2
    delay_gap_ms = abs(measured.delay_ms - stated.delay_ms)
    return rates_differ or delay_gap_ms > max(1.0, 0.2 * stated.delay_ms)


def _pace_text(layer_ms: float | None) -> str:
    return f"layers paced to {layer_ms:g} ms" if layer_ms else "unpaced layers"
