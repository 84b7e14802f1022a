"""The configuration group `data`: which tokens a run trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.schema import check, key, refuse


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from."""

    kind: Annotated[
        str | None,
        key(
            "synthetic: seeded tokens made on the fly, for throughput, not for learning; "
            "indexed: Megatron's indexed data set, made by `holmes data prepare FILES -o "
            "PREFIX`; null: nobody said, which only models for trying (hidden at most "
            "512) and calibration take for synthetic",
            one_of=("synthetic", "indexed"),
        ),
    ] = None
    seed: Annotated[int | None, key("of the order of samples; null: train.seed", ge=0, lt=1 << 32)] = 1234
    prefix: Annotated[
        str | tuple[str | float, ...] | None, key("of an indexed data set: PREFIX, or a blend [0.7, a, 0.3, b]")
    ] = None
    documents: Annotated[
        str,
        key(
            "of an indexed data set, whose documents are packed into samples: joined: a token "
            "attends to all before it; apart: to those of its own document alone",
            one_of=("joined", "apart"),
        ),
    ] = "joined"
    split: Annotated[str, key("shares of training and validation; 90,10 with data=indexed")] = "100,0"
    tokenizer: Annotated[
        str | None,
        key("a tokenizer.json that `holmes export` puts beside the weights; the data have been tokenized already"),
    ] = None
    cache: Annotated[str | None, key("where indices of samples are kept; null: in the run directory")] = None
    learnable: Annotated[
        bool, key("of synthetic data: most tokens follow from the one before, so that the loss falls")
    ] = False

    def __post_init__(self) -> None:
        check(self, "data", dotted=True)
        refuse(
            "",
            (
                self.kind == "indexed" and not self.prefix,
                "data.prefix is not given",
                "give data.prefix=PREFIX of `holmes data prepare`",
            ),
            (
                self.documents == "apart" and self.kind != "indexed",
                "data.documents is apart, and synthetic data have no documents",
                "leave it out",
            ),
        )
