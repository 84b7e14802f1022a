"""Show how ranks share the writing and the reading of a checkpoint.

    python benchmarks/checkpoint_shares.py [--hidden 256]

16 local ranks (TP 2, PP 2, DP 4) train two steps and save. The checkpoint is then loaded under the same layout and
others. Prints the bytes that each rank wrote, and the bytes that all ranks read over those of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from gpu_proof_models import TINY
from gpu_proof_processes import train_ranks

LAYOUTS = {"same layout": (16, 2, 2), "TP 1, PP 2, DP 4": (8, 1, 2), "TP 2, PP 1, DP 4": (8, 2, 1)}  # ranks, TP, PP
# Counts the bytes that a rank's loading asks torch's reader for, in a file of its own.
COUNT = """
import os, pathlib
from torch.distributed.checkpoint.filesystem import FileSystemReader
read_data, total = FileSystemReader.read_data, [0]
def counted(reader, plan, planner):
    total[0] += sum(reader.storage_data[item.storage_index].length for item in plan.items)
    pathlib.Path(os.environ["HOLMES_COUNT"], os.environ.get("RANK", "0")).write_text(str(total[0]))
    return read_data(reader, plan, planner)
FileSystemReader.read_data = counted
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hidden", type=int, default=256)
    hidden = options.parse_args().hidden
    model = [*TINY, f"model.hidden={hidden}", f"model.ffn={4 * hidden}", "batch.global_size=16", "train.device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (ranks, tp, pp)) in enumerate([("saving", LAYOUTS["same layout"]), *LAYOUTS.items()]):
            layout = [
                *model,
                f"plan.tp={tp}",
                f"plan.pp={pp}",
                "train.checkpoint_interval=2",
                "train.checkpoint_async=false",
            ]
            run, counts = Path(folder, str(number)), Path(folder, f"counts-{number}")
            counts.mkdir()
            resumed = (
                [f"checkpoint={folder}/0/checkpoints/step-00000002", "train.steps=3"] if number else ["train.steps=2"]
            )
            train_ranks(
                ranks, [*layout, *resumed, f"run_dir={run}"], prelude=COUNT, variables={"HOLMES_COUNT": str(counts)}
            )
            sizes = {
                int(path.name.split("_")[2]): path.stat().st_size
                for path in Path(folder, "0/checkpoints/step-00000002").glob("*.distcp")
            }
            if not number:
                mean = sum(sizes.values()) / ranks
                print(f"saving, TP {tp}, PP {pp}, {ranks} ranks: {sum(sizes.values()) / 1e6:.1f} MB")
                shares = {rank: round(size / mean, 3) for rank, size in sorted(sizes.items())}
                print(f"bytes of each rank, relative to the mean: {json.dumps(shares)}", flush=True)
                continue
            read = sum(int(path.read_text()) for path in counts.iterdir())
            print(f"loading, {name}: {read / sum(sizes.values()):.2f} of the checkpoint's bytes", flush=True)


if __name__ == "__main__":
    main()
