"""Measure memory and time to load Hugging Face weights: a random Llama of 1.6 GB (fp32) into TP 2 x PP 2.

    python benchmarks/hugging_face.py

Ranks are processes of this machine. Prints per rank the peak memory while loading above the memory before, its slice,
its largest tensor, and the seconds. Exits with 1 if the first exceeds the slice, the largest tensor and 100 MiB.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import spawn
import torch

from holmes_hpc.config.hugging_face import config_of
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.training.checkpoint import hugging_face_folder, weight_names

LARGE = ModelSpec("large", 16, 1280, 20, 32000, ffn=3456, kv_heads=20, max_positions=512)
ALLOWED = 100 * 2**20


def measure(root: Path) -> None:
    from safetensors.torch import save_file

    numbers = torch.Generator().manual_seed(1)
    tensors = {n: 0.02 * torch.randn(s, generator=numbers) for n, s in weight_names.tensor_shapes(LARGE).items()}
    size = sum(t.nbytes for t in tensors.values())
    folder = root / "large"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(LARGE, "float32")))
    del tensors
    import megatron.core

    print(
        f"{size / 1e9:.2f} GB of weights, Megatron-Core {megatron.core.__version__}, torch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.2f}",
        flush=True,
    )
    fork = torch.multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_load, args=(rank, root)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)


def _load(rank: int, root: Path) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from holmes_hpc.training.model import gpt
    from holmes_hpc.training.rank import cpu

    cpu.install()
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(2, 2, create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    plan = spawn.plan(tp=2, pp=2, model=LARGE)
    config = gpt.transformer_config(plan, torch.float32, cuda=False)
    (chunk,) = gpt.build(plan, config, None, torch.device("cpu"))
    sizes = [p.nbytes for p in chunk.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory of this process
    start_bytes, start = _memory_bytes("VmRSS"), time.perf_counter()
    hugging_face_folder.fill_model(root / "large", LARGE, [chunk], rank % 2)
    elapsed_s, peak_bytes = time.perf_counter() - start, _memory_bytes("VmHWM") - start_bytes
    is_within = peak_bytes <= sum(sizes) + max(sizes) + ALLOWED
    for printing_rank in range(4):
        dist.barrier()
        if printing_rank == rank:
            print(
                f"rank {rank}: {peak_bytes / 2**20:.0f} MiB above the start; its slice {sum(sizes) / 2**20:.0f} MiB, "
                f"its largest tensor {max(sizes) / 2**20:.0f} MiB; "
                f"{'within' if is_within else 'ABOVE'} both and 100 MiB; {elapsed_s:.1f} s",
                flush=True,
            )
    dist.destroy_process_group()
    sys.exit(not is_within)


def _memory_bytes(name: str) -> int:
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holmes-hugging-face-") as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
