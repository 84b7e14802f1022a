"""The monitors of a run on rank 0: they warn about slow NICs, links and nodes from every rank's row of a step."""

from collections.abc import Iterator, Mapping
from typing import Any

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.training.checkpoint.save_and_load import Checkpoints
from holmes_hpc.training.metrics.metrics_line import NIC_COLUMNS, SENT_COLUMNS, part_by_rank
from holmes_hpc.training.metrics.openmetrics import Exporter, Factors
from holmes_hpc.training.network.audit import Audit, planned_bytes
from holmes_hpc.training.network.destinations import Destinations
from holmes_hpc.training.network.nic_bytes import Rows
from holmes_hpc.training.network.slow_links import slow_edge_detector, slow_link_detector
from holmes_hpc.training.rank.stragglers import Stragglers, work_of_stages
from holmes_hpc.training.session import Session

UNBALANCED = 1.1  # of `expert_imbalance`: from here on, a rank may take longer because of its experts, not its node


class Monitors:
    """The monitors of a session. They also pass each step to the exporter of ``train.openmetrics``, if it is set."""

    def __init__(
        self,
        session: Session,
        train: TrainConfig,
        factors: Factors,
        destinations: Destinations,
        checkpoints: Checkpoints,
    ) -> None:
        plan, nodes = session.plan, session.node_of_rank
        self.one_host, self._destinations = nodes[0].one_host, destinations
        self._stragglers = Stragglers(
            plan.parallel.stage_ranks,
            [n.node for n in nodes],
            *work_of_stages(plan, (train.pace_factors or {}) if train.pace_layer_ms else None),
        )
        has_exporter = train.openmetrics is not None
        planned = [] if self.one_host and not has_exporter else planned_bytes(plan, train.dtype)
        if not self.one_host:
            self._audit = Audit(plan, nodes, factors, planned)
            self._links = slow_link_detector(plan, nodes, factors, planned)
            self._edges = slow_edge_detector(plan, nodes, planned)
        self._exporter = Exporter(session, train, factors, checkpoints, planned) if has_exporter else None

    def add(self, rows: Rows, line: Mapping[str, Any], is_step_only: bool) -> Iterator[object]:
        """Add a step and yield warnings about it.
        `rows`: the rows of all ranks; `line`: the step's line of metrics.jsonl; `is_step_only`: whether the step's
        traffic and time include nothing of connection set-up, a checkpoint or validation."""
        sent = rows[:, SENT_COLUMNS]
        if not self.one_host:
            yield from self._audit.add(rows[:, NIC_COLUMNS], is_step_only)
            if is_step_only:
                yield from self._links.add(part_by_rank(rows, "grad_sync_s"))
                yield from self._edges.add(self._destinations.edge_seconds(sent))
        if line.get("expert_imbalance", 1.0) < UNBALANCED:  # exchanges wait for slower ranks
            yield from self._stragglers.add(part_by_rank(rows, "compute_s") - part_by_rank(rows, "expert_s"))
        if self._exporter is not None:
            slow = {} if self.one_host else {**self._links.slow, **self._edges.slow}
            self._exporter.add(line, slow, gpus=sent[:, self._destinations.width :].tolist())

    def close(self) -> None:
        """Write the exporter's metrics of the last step, if there is an exporter."""
        if self._exporter is not None:
            self._exporter.write()
