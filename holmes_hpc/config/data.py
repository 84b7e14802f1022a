"""The configuration group `data`: the tokens that a run trains on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.errors import Case
from holmes_hpc.schema import Checked, key


@dataclass(frozen=True)
class DataConfig(Checked, where="data", dotted=True):
    """The source of samples."""

    kind: Annotated[
        str | None,
        key(
            "synthetic: seeded random tokens, for throughput measurements; indexed: Megatron's indexed data set, made "
            "by `holmes data prepare FILES -o PREFIX`; null: synthetic for trial models (hidden at most 512) and for "
            "calibration, otherwise an error",
            one_of=("synthetic", "indexed"),
        ),
    ] = None
    seed: Annotated[int | None, key("seed of the sample order; null: train.seed", ge=0, lt=1 << 32)] = 1234
    prefix: Annotated[
        str | tuple[str | float, ...] | None, key("indexed data set: PREFIX, or a blend [0.7, a, 0.3, b]")
    ] = None
    documents: Annotated[
        str,
        key(
            "joined: a token attends to all earlier tokens of its sample; apart: only to those of its document",
            one_of=("joined", "apart"),
        ),
    ] = "joined"
    split: Annotated[str, key("shares of training and validation data; 90,10 with data=indexed")] = "100,0"
    tokenizer: Annotated[
        str | None, key("tokenizer.json that `holmes export` copies to the weights; training does not use it")
    ] = None
    cache: Annotated[str | None, key("folder of the sample indices; null: the run directory")] = None
    learnable: Annotated[
        bool, key("synthetic data: most tokens follow from the previous one, so that the loss falls")
    ] = False

    def _mistakes(self) -> Iterator[Case]:
        is_indexed, hint = self.kind == "indexed", "give data.prefix=PREFIX of `holmes data prepare`"
        yield is_indexed and not self.prefix, "data.prefix is not given, but data.kind is indexed", hint
        problem = "data.documents is apart, but synthetic data have no documents"
        yield self.documents == "apart" and not is_indexed, problem, "remove data.documents, or use data=indexed"
