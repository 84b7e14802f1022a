"""What a rank's loading from Hugging Face takes: a random Llama of 1.6 GB (fp32) into TP 2 x PP 2 on this machine.

    python benchmarks/hugging_face.py

Printed for each rank: what its process held at most while loading beyond what it held before, its slice, its largest
tensor, the seconds. Exit code 1 where the first is above the sum of the others and 100 MiB.
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
    own = [p.nbytes for p in chunk.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # the peak, from here on
    before, began = _status("VmRSS"), time.perf_counter()
    hugging_face_folder.fill_model(root / "large", LARGE, [chunk], rank % 2)
    took, above = time.perf_counter() - began, _status("VmHWM") - before
    within = above <= sum(own) + max(own) + ALLOWED
    for turn in range(4):
        dist.barrier()
        if turn == rank:
            print(
                f"rank {rank}: {above / 2**20:.0f} MiB above before; its slice {sum(own) / 2**20:.0f} MiB, its "
                f"largest tensor {max(own) / 2**20:.0f} MiB: {'within' if within else 'ABOVE'} both and 100 MiB; "
                f"{took:.1f} s",
                flush=True,
            )
    dist.destroy_process_group()
    sys.exit(not within)


def _status(name: str) -> int:
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holmes-hugging-face-") as made:
        measure(Path(made))


if __name__ == "__main__":
    main()
