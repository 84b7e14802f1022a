"""Pipelines in real processes, for tests of edges and schedules, and for benchmarks/gpu_proof_parts.py.

As a script it serves requests on its input (:class:`Server`). Cases with the same world share their processes, which
are forked after torch and Megatron-Core were imported. With a GPU they are spawned: importing Megatron-Core queries
CUDA, which then does not work in a fork."""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from leftovers import exempt

from holmes_hpc.config.model import Batch
from holmes_hpc.lifetime import end_with
from holmes_hpc.planning.plan.parallel import Parallel, groups
from holmes_hpc.planning.plan.plan import GroupTransport
from holmes_hpc.planning.plan.transport import TCP
from holmes_hpc.planning.schedule.kinds import SCHEDULES
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.training.rank import compiler, cpu

with compiler.delayed():  # as ranks do
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import schedules as megatron
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from holmes_hpc.training import warm_up
    from holmes_hpc.training.metrics.breakdown import Breakdown
    from holmes_hpc.training.model.emulated_layers import emulate
    from holmes_hpc.training.model.weight_gradients import WeightGradients
    from holmes_hpc.training.pipeline import point_to_point
    from holmes_hpc.training.pipeline.eager_1f1b import TraceEvent, run_eager_1f1b

SEQUENCE, MICRO, HIDDEN, VOCABULARY = 8, 2, 16, 32
START_METHOD = "HOLMES_TESTS_START"  # spawn or fork


@dataclass
class Case:
    """One case of model, schedule and transport.

    `layers`: per stage, and per chunk within. `micro_batches`: of each step in turn, repeated for more steps.
    `schedule`: megatron (its own communicator), edges (Megatron's schedule over this package's channels), or one of
    SCHEDULES that exchanges in the background. `delay_s`: upper limit of a transfer's random delay. `rate`: upper
    limit of its bytes per second. `pace_s`: emulated compute, a layer's forward time; its backward takes twice as
    long. `as_on_gpu`: a warm-up before the first step, receives posted in NCCL's order, and a GPU's worst case:
    every launch waits for the previous one, a send until it is received."""

    layers: list[list[int]]
    micro_batches: list[int]
    schedule: str
    in_flight: list[int] | None = None
    deferred: tuple[int, ...] = ()
    final: tuple[int, ...] = ()
    steps: int = 1
    dp: int = 1
    tp: int = 1
    dropout: float = 0.0
    overlap: bool = False
    edge_dtype: str = "same"
    stripes: int = 1
    staged: bool = False
    delay_s: float = 0.0
    rate: float = 0.0
    pace_s: float = 0.0
    forward_only: bool = False
    deallocate: bool = True
    per_token: bool = False
    as_on_gpu: bool = False
    seed: int = 1
    hidden: int = HIDDEN
    trace: bool = True
    lr: float = 0.1
    device: str = "cpu"
    backend: str = "gloo"  # nccl: all ranks share one GPU and use sockets as if each were a host

    @property
    def world(self) -> tuple[int, int, int, int, str, str]:
        return len(self.layers), len(self.layers[0]), self.dp, self.tp, self.device, self.backend


class SlowChannel(point_to_point.Channel):
    """A channel with delayed sends: each takes a random delay and its bytes' time at a rate, in turn."""

    delay_s, rate, staged, one_by_one = 0.0, 0.0, False, False

    def _start(self, *args: Any) -> point_to_point.Transfer:
        transfer = super()._start(*args)
        if self.one_by_one:
            transfer.wait()
        return transfer

    def _through_host(self, wire: torch.Tensor) -> bool:
        return self.staged or super()._through_host(wire)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._random = random.Random(self.name)
        threading.Thread(target=self._carry, daemon=True).start()

    def _post(self, operation: Any, wire: torch.Tensor, tag: int) -> list[Any]:
        if operation is dist.irecv or not (self.delay_s or self.rate):
            return super()._post(operation, wire, tag)
        posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue.put((wire, tag, posted))
        return [SimpleNamespace(wait=lambda: [work.wait() for work in posted.get()])]

    def _carry(self) -> None:
        while True:
            wire, tag, posted = self._queue.get()
            time.sleep(self._random.uniform(0, self.delay_s) + (wire.nbytes / self.rate if self.rate else 0.0))
            posted.put(super()._post(dist.isend, wire, tag))


def make_model(case: Case, config: TransformerConfig) -> list[torch.nn.Module]:
    """Return this rank's chunks in Megatron's DDP; a seed gives the same weights under every schedule."""
    model_parallel_cuda_manual_seed(case.seed)
    torch.manual_seed(case.seed)
    stage, stages, chunks = parallel_state.get_pipeline_model_parallel_rank(), len(case.layers), len(case.layers[0])
    models: list[torch.nn.Module] = []
    for chunk in range(chunks):
        first, last = stage == chunk == 0, stage == stages - 1 and chunk == chunks - 1
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=False,
            vp_stage=chunk if chunks > 1 else None,
        )
        if case.pace_s:
            emulate([model.decoder.layers], 1000 * case.pace_s, config.timers)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500)
        models.append(DistributedDataParallel(config, ddp, model.to(case.device), disable_bucketing=False))
    config.no_sync_func = [m.no_sync for m in models] if chunks > 1 else models[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return models


def make_config(case: Case) -> TransformerConfig:
    stages, chunks = len(case.layers), len(case.layers[0])
    names = [["t" * case.layers[s][c] for s in range(stages)] for c in range(chunks)]
    names[0][0] = "E" + names[0][0]
    names[-1][-1] += "L"
    return TransformerConfig(
        num_layers=sum(map(sum, case.layers)),
        hidden_size=case.hidden,
        num_attention_heads=2,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=case.tp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout="|".join(itertools.chain.from_iterable(names)),
        batch_p2p_comm=not case.overlap,
        overlap_p2p_comm=case.overlap,
        overlap_p2p_comm_warmup_flush=case.overlap and not case.as_on_gpu,  # off in training
        deallocate_pipeline_outputs=case.deallocate,
        calculate_per_token_loss=case.per_token,
        timers=Breakdown() if case.pace_s else None,
    )


def batches(case: Case, step: int) -> Iterator[torch.Tensor]:
    """Yield micro-batches of tokens, the same for every schedule."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * step + parallel_state.get_data_parallel_rank())
    while True:
        yield torch.randint(VOCABULARY, (MICRO, SEQUENCE + 1), generator=generator).to(case.device)


def forward_step(case: Case, data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    position = torch.arange(SEQUENCE, device=case.device).expand(MICRO, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=case.device).triu(1)
    output = model(tokens[:, :-1].contiguous(), position, mask, labels=tokens[:, 1:].contiguous())

    def loss(values: torch.Tensor) -> Any:
        if case.per_token:
            count = torch.tensor(values.numel(), dtype=torch.int, device=case.device)
            return values.sum(), count, {"loss": values.detach().mean()}
        mean = values.mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def communicator(case: Case, config: TransformerConfig) -> point_to_point.EdgeCommunicator:
    """Return a communicator over this world's channels, which are built once per kind of case."""
    stages, chunks, dp, tp, *_ = case.world
    parallel = Parallel.uniform(pp=stages, dp=dp, tp=tp, virtual_stages=chunks)
    plan = SimpleNamespace(
        parallel=parallel,
        edge_dtype=case.edge_dtype,
        edge_connections=case.stripes,
        transports=lambda: (
            GroupTransport(g.kind, g.ranks, TCP, g.stages) for g in groups(parallel, parallel.dp, tied=True)
        ),
    )
    channels = _channels(case.world, plan, config)
    for channel in channels.values():
        channel.delay_s, channel.rate, channel.staged = case.delay_s, case.rate, case.staged
        channel.one_by_one = case.as_on_gpu
    return point_to_point.EdgeCommunicator(
        parallel_state.get_pipeline_model_parallel_group(), config, channels, torch.device(case.device)
    )


_built_channels: dict[Any, dict[str, Any]] = {}
_group_sizes: set[int] = set()  # of groups with point-to-point traffic in the current case


def _watch_groups() -> None:
    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            _group_sizes.add(dist.get_world_size(group))
            return operation(*args, group=group, **options)

        return call

    for name in ("isend", "irecv"):
        operation = watched(getattr(dist, name))
        setattr(dist, name, operation)
        setattr(dist.distributed_c10d, name, operation)


def _channels(world: Any, plan: Any, config: TransformerConfig) -> dict[str, Any]:
    key = world, plan.edge_dtype, plan.edge_connections
    if key not in _built_channels:
        with mock.patch.object(point_to_point, "Channel", SlowChannel):
            built = point_to_point.build_communicator(
                plan,
                lambda edge: dist.new_group(list(edge.ranks), backend=world[5]),
                rank=dist.get_rank(),
                pp_group=parallel_state.get_pipeline_model_parallel_group(),
                config=config,
                device=torch.device(world[4]),
            )
        _built_channels[key] = built.channels
    return _built_channels[key]


def run(case: Case) -> dict[str, Any]:
    """Run one rank's part of a case: losses and a digest of all gradients per step, times, and traced events."""
    config = make_config(case)
    models = make_model(case, config)
    _group_sizes.clear()
    events: list[TraceEvent] = []
    schedule: Callable[..., Any] = (
        megatron.forward_backward_pipelining_with_interleaving
        if len(models) > 1
        else megatron.forward_backward_pipelining_without_interleaving
    )
    edge_arguments: dict[str, Any] = {}
    if case.schedule != "megatron":
        edge_arguments = {
            "p2p_communicator": communicator(case, config),
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }
    weights = None
    if case.schedule in SCHEDULES:
        order = Order(
            case.schedule,
            len(case.layers),
            case.micro_batches[0],
            len(models),
            in_flight=tuple(case.in_flight or ()),
            deferred=tuple(case.deferred),
            final=tuple(case.final),
        )
        if order.schedule.splits:
            weights = WeightGradients([model.module for model in models], Breakdown())
        schedule = functools.partial(
            run_eager_1f1b, order=order, tracer=events.append if case.trace else None, weights=weights
        )
    losses, digests, times, ends = [], [], [], []
    if case.as_on_gpu:
        edge_arguments["p2p_communicator"].on_device = True
        groups = ProcessGroupCollection.use_mpu_process_groups()
        connected = warm_up.connect(groups, torch.device(case.device))
        assert ("tp" in connected) == (case.tp > 1) and ("dp_cp" in connected) == (case.dp > 1)
        warm_up.local_passes(models, config, Batch(MICRO, MICRO, SEQUENCE), torch.device(case.device), weights)
    for step in range(case.steps):
        for model in models:
            model.zero_grad_buffer()
        data = [batches(case, step) for _ in models]
        dist.barrier()
        start_s = time.perf_counter()
        step_losses = schedule(
            forward_step_func=functools.partial(forward_step, case),
            data_iterator=data if len(models) > 1 else data[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=case.micro_batches[step % len(case.micro_batches)],
            seq_length=SEQUENCE,
            micro_batch_size=MICRO,
            forward_only=case.forward_only,
            **edge_arguments,
        )
        if case.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
        ends.append(len(events))
        losses.append([entry["loss"].item() for entry in step_losses])
        digest = hashlib.sha256()
        for parameter in itertools.chain.from_iterable(m.parameters() for m in models):
            digest.update(parameter.main_grad.cpu().numpy().tobytes())
            parameter.data.add_(parameter.main_grad, alpha=-case.lr)
        digests.append(digest.hexdigest())
    return {
        "losses": losses,
        "gradients": digests,
        "times": times,
        "events": [[list(e) for e in events[a:b]] for a, b in zip([0, *ends], ends, strict=False)],
        "group_sizes": sorted(_group_sizes),
    }


def _rank(rank: int, world: Any, cases: list[tuple[int, Case]], folder: str) -> None:
    end_with(os.getppid())
    torch.set_num_threads(1)
    stages, chunks, dp, tp, device, backend = world
    if device == "cpu":
        cpu.install()
    else:
        os.environ.update(
            NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket", CUBLAS_WORKSPACE_CONFIG=":4096:8"
        )
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Megatron's DDP also reduces gradients of a single replica, which gloo cannot do with CUDA tensors.
    backends = "cpu:gloo,cuda:nccl" if (device, backend) == ("cuda", "gloo") else backend
    try:
        dist.init_process_group(
            backends, store=dist.FileStore(f"{folder}/store", stages * dp * tp), rank=rank, world_size=stages * dp * tp
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        _watch_groups()
        with open(f"{folder}/{rank}.jsonl", "w", encoding="utf-8") as out:
            for index, case in cases:
                out.write(json.dumps([index, rank, run(case)]) + "\n")
                out.flush()
        dist.barrier()
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc()[-1000:], encoding="utf-8")
        os._exit(1)
    os._exit(0)  # do not wait for torch's threads


def play(cases: list[Case], timeout_s: float = 900) -> list[list[dict[str, Any]]]:
    """Run the cases, world by world, and return each rank's result per case.

    Raises RuntimeError if a rank fails or hangs."""
    results: list[list[dict[str, Any]]] = [[] for _ in cases]
    context = start_context()
    for world in dict.fromkeys(case.world for case in cases):
        world_cases = [(i, case) for i, case in enumerate(cases) if case.world == world]
        ranks = world[0] * world[2] * world[3]
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_rank, args=(rank, world, world_cases, folder)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            end = time.monotonic() + timeout_s
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            codes = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
                process.join()
            lines = [
                Path(folder, f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
                if Path(folder, f"{rank}.jsonl").exists()
                else []
                for rank in range(ranks)
            ]
            if any(code != 0 for code in codes):  # None: a rank hangs
                tracebacks = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.txt")))
                raise RuntimeError(
                    f"world {world}: exit codes {codes}; cases done per rank {[len(x) for x in lines]}\n" + tracebacks
                )
            for index, _, result in sorted(map(json.loads, itertools.chain.from_iterable(lines)), key=lambda x: x[:2]):
                results[index].append(result)
    return results


def start_context() -> Any:
    """Return the multiprocessing context; :data:`START_METHOD` in the environment overrides it."""
    return multiprocessing.get_context(
        os.environ.get(START_METHOD) or ("spawn" if torch.cuda.is_available() else "fork")
    )


def _run_one_of_pair(file: str, function: str, rank: int, folder: str, args: tuple[Any, ...]) -> None:
    runpy.run_path(file)[function](rank, folder, *args)


def pair(file: str, function: str, *args: Any) -> bool:
    """Run `function(rank, folder, *args)` of `file` in two processes; return whether both succeeded."""
    context = start_context()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_one_of_pair, args=(file, function, rank, folder, args)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
            process.join()
        return all(process.exitcode == 0 for process in processes)


class Server:
    """A process of this file that has loaded torch and Megatron-Core and forks ranks.

    Ranks start at once, and without the caller's threads. The server ends with the caller."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        exempt(self._process.pid)
        atexit.register(self._process.kill)

    def call(self, function: str, *args: Any, timeout_s: float) -> Any:
        """Run `play` or `pair` in the server. Raises RuntimeError with its error message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        sys.audit("tests.process", function)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            self._process.stdin.write(json.dumps([str(result), function, *args]) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)  # its ranks too
                server.cache_clear()
                raise RuntimeError(f"{function}: no answer in {timeout_s} s")
            if error := json.loads(self._process.stdout.readline()):
                raise RuntimeError(error)
            return json.loads(result.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def server() -> Server:
    return Server()


def play_apart(cases: list[Case], timeout_s: float = 900) -> list[list[dict[str, Any]]]:
    """Run :func:`play` in the server."""
    return server().call("play", [asdict(case) for case in cases], timeout_s, timeout_s=timeout_s + 30)


def serve() -> None:
    end_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep ranks' output out of the answers
    for line in sys.stdin:
        result, function, *args = json.loads(line)
        error = ""
        try:
            value = play([Case(**entry) for entry in args[0]], *args[1:]) if function == "play" else pair(*args)
            Path(result).write_text(json.dumps(value), encoding="utf-8")
        except Exception:
            error = traceback.format_exc()[-3000:]
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    serve()
