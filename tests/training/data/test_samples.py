"""The order of samples depends only on seed and step, not on the layout. Unusable data are refused."""

from __future__ import annotations

import itertools
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_pickle import Code
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import DataError
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Component, Plan, Schedule, Stage
from holmes_hpc.training.data import prefix as prefixes
from holmes_hpc.training.data import prepare
from holmes_hpc.training.data.build import Synthetic, build_datasets, describe_data
from holmes_hpc.training.data.samples import batches, permute, sample_indices

VOCAB = 257


def plan(dp: int = 1, micro: int = 2, size: int = 8, length: int = 16, vocab: int = VOCAB) -> Plan:
    site = Site("s", (Pool("f", NicType.ETHERNET, "p", 1, dp, 10, CPU, gres=False),))
    return Plan(
        strategy="one-fabric",
        model=ModelSpec("m", 2, 32, 4, vocab, 64, 4),
        batch=Batch(size, micro, length),
        parallel=Parallel.uniform(dp=dp),
        recompute="none",
        schedule=Schedule("1f1b", (1,)),
        components=(Component("p", "", "f", 1, dp, (0,)),),
        stages=(Stage("f", 2),),
        site=site,
    )


def datasets(p: Plan, run_dir: Path | None = None, eval_interval: int = 0, **data: Any) -> tuple[Any, Any]:
    return build_datasets(
        DataConfig(**{"seed": 7, "split": "100", **data}),
        TrainConfig(eval_interval=eval_interval),
        p,
        str(run_dir) if run_dir else None,
    )


def write_prefix(path: Path, documents: list[list[int]]) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    path.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{path}.idx")
    return str(path)


def random_documents(count: int, seed: int = 0, low: int = 0, high: int = VOCAB) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(low, high, random.integers(5, 60)).tolist() for _ in range(count)]


def rows(dataset: object, p: Plan, steps: range) -> list[set[tuple[int, ...]]]:
    """Return the samples of each step, over all data-parallel ranks."""
    samples: list[set[tuple[int, ...]]] = [set() for _ in steps]
    for rank in range(p.parallel.dp):
        stream = batches(dataset, p, rank, steps.start)  # type: ignore[arg-type]
        for step in range(len(steps)):
            for b in itertools.islice(stream, p.micro_batches):
                samples[step] |= {tuple(r) for r in b["tokens"].tolist()}
    return samples


@given(dp=st.integers(1, 8), micro=st.integers(1, 5), per_rank=st.integers(1, 5), step=st.integers(0, 1000))
def test_step_uses_each_of_its_samples_once(dp: int, micro: int, per_rank: int, step: int) -> None:
    size = dp * micro * per_rank
    indices = [i for d in range(dp) for m in range(per_rank) for i in sample_indices(step, m, d, dp, micro, size)]
    assert sorted(indices) == list(range(step * size, (step + 1) * size))


@settings(max_examples=60)
@given(size=st.integers(1, 300), key=st.tuples(st.integers(0, 2**32), st.integers(0, 2**20)))
def test_permute_is_a_permutation(size: int, key: tuple[int, int]) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permutation_differs_from_the_identity_and_between_epochs() -> None:
    first, second = ([permute(i, 500, (1, epoch)) for i in range(500)] for epoch in (1, 2))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20
    assert sum(a == i for i, a in enumerate(first)) < 20


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prefix(tmp_path_factory.mktemp("data") / "text", random_documents(80))


@pytest.mark.parametrize("kind", ["synthetic", "indexed"])
def test_samples_of_a_step_do_not_depend_on_the_layout(kind: str, prefix: str, tmp_path: Path) -> None:
    expected = None
    for dp, micro in [(1, 8), (1, 2), (2, 2), (4, 1), (4, 2)]:
        p = plan(dp, micro)
        train, _ = datasets(p, tmp_path, kind=kind, prefix=prefix, split="100,0")
        samples = rows(train, p, range(0, 30))  # several epochs of the 80 documents
        assert [len(s) for s in samples] == [8] * 30
        assert expected is None or samples == expected, (dp, micro)
        expected = samples


@pytest.mark.parametrize("kind", ["synthetic", "indexed"])
def test_stream_continues_at_any_step(kind: str, prefix: str, tmp_path: Path) -> None:
    p = plan(2, 2)
    train, _ = datasets(p, tmp_path, kind=kind, prefix=prefix)
    uninterrupted = list(itertools.islice(batches(train, p, 1, 0), 20 * p.micro_batches))
    reopened, _ = datasets(p, tmp_path, kind=kind, prefix=prefix)
    resumed = list(itertools.islice(batches(reopened, p, 1, 13), 7 * p.micro_batches))
    for a, b in zip(uninterrupted[13 * p.micro_batches :], resumed, strict=True):
        assert torch.equal(a["tokens"], b["tokens"]) and torch.equal(a["labels"], b["labels"])


def test_micro_batch_has_the_shapes_and_types_of_the_model() -> None:
    p = plan()
    train, valid = datasets(p)
    assert valid is None
    b = next(batches(train, p, 0))
    assert b["attention_mask"] is None
    for key, dtype in (
        ("tokens", torch.int64),
        ("labels", torch.int64),
        ("position_ids", torch.int64),
        ("loss_mask", torch.float32),
    ):
        assert b[key].shape == (2, 16) and b[key].dtype == dtype and b[key].is_contiguous(), key
    assert torch.equal(b["tokens"][:, 1:], b["labels"][:, :-1])
    assert b["position_ids"].tolist() == [list(range(16))] * 2


def test_seed_changes_the_order_and_validation_samples_differ(prefix: str, tmp_path: Path) -> None:
    p = plan()
    for kind in ("synthetic", "indexed"):
        data = {"kind": kind, "prefix": prefix, "split": "80,20"}
        train, valid = datasets(p, tmp_path, 5, **data)
        reseeded, _ = datasets(p, tmp_path, 5, **data, seed=8)
        assert valid is not None
        assert rows(train, p, range(3)) != rows(reseeded, p, range(3))
        steps = range(0, len(train) // 8) if kind == "indexed" else range(3)
        training_samples = set().union(*rows(train, p, steps))
        assert not training_samples & set().union(*rows(valid, p, range(0, 2)))


def test_epoch_has_every_sample_of_the_documents_once(prefix: str, tmp_path: Path) -> None:
    train, _ = datasets(plan(), tmp_path, kind="indexed", prefix=prefix)
    first = [tuple(train.tokens(i)) for i in range(len(train))]
    second = [tuple(train.tokens(i)) for i in range(len(train), 2 * len(train))]
    assert len(set(first)) == len(first) == (sum(map(len, random_documents(80))) - 1) // 16
    assert sorted(first) == sorted(second) and first != second


def test_blend_has_its_weights_in_every_interval(tmp_path: Path) -> None:
    low = write_prefix(tmp_path / "low", random_documents(40, 1, 0, 100))
    high = write_prefix(tmp_path / "high", random_documents(10, 2, 100, 200))  # short, so that it repeats early
    train, _ = datasets(plan(), tmp_path, kind="indexed", prefix=[3, low, 1, high])
    from_high = [train.tokens(i).min() >= 100 for i in range(400)]
    for count in range(8, 400, 7):
        assert abs(sum(from_high[:count]) - count / 4) <= 1.5
    high_samples = [tuple(train.tokens(i)) for i in range(400) if from_high[i]]
    epoch = (sum(map(len, random_documents(10, 2, 100, 200))) - 1) // 16
    assert len(set(high_samples[:epoch])) == epoch == len(set(high_samples))
    by_size, _ = datasets(plan(), tmp_path, kind="indexed", prefix=[low, high])
    share = sum(by_size.tokens(i).min() >= 100 for i in range(len(by_size))) / len(by_size)
    assert share == pytest.approx(epoch / len(by_size), abs=0.02)


def test_replaced_data_get_a_new_index(tmp_path: Path) -> None:
    old = random_documents(40)
    for new in (random_documents(30, 5), old[::-1]):  # the second has as many documents and tokens as the first
        path = tmp_path / f"text{len(new)}"
        datasets(plan(), tmp_path, kind="indexed", prefix=write_prefix(path, old))
        name = write_prefix(path, new)
        actual, _ = datasets(plan(), tmp_path, kind="indexed", prefix=name)
        expected, _ = datasets(plan(), tmp_path / "empty cache", kind="indexed", prefix=name)
        assert len(actual) == len(expected) == (sum(map(len, new)) - 1) // 16
        assert all((actual.tokens(i) == expected.tokens(i)).all() for i in range(len(expected)))


def test_incomplete_index_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_prefix(tmp_path / "text", random_documents(40))
    save, calls = np.save, []

    def fail_at_second_call(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "save", fail_at_second_call)
    with pytest.raises(DataError, match=r"cannot write the index.*No space left"):
        datasets(plan(), tmp_path, kind="indexed", prefix=name)
    assert not list((tmp_path / "data").glob("*"))
    monkeypatch.setattr(np, "save", save)
    train, _ = datasets(plan(), tmp_path, kind="indexed", prefix=name)
    assert len(train) > 8


def test_code_in_a_shared_index_is_not_executed(tmp_path: Path) -> None:
    shared = {
        "kind": "indexed",
        "prefix": write_prefix(tmp_path / "text", random_documents(40)),
        "cache": str(tmp_path / "shared"),
    }
    datasets(plan(), **shared)
    malicious = list((tmp_path / "shared").glob("*/*.npy"))
    for path in malicious:
        path.write_bytes(pickle.dumps(Code(tmp_path / "executed")))
    with pytest.raises(DataError, match="cannot read the index"):
        datasets(plan(), **shared)
    assert len(malicious) == 3 and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (34 + 4 * 20, struct.pack("<i", 1 << 30), "sequence 20 is at bytes"),
        (34 + 4 * 20, struct.pack("<i", -5), "sequence 20 is at bytes"),
        (34 + 4 * 40 + 8 * 20, struct.pack("<q", 6), "sequence 20 is at bytes 6 to"),
        (34 + 12 * 40 + 8 * 20, struct.pack("<q", 1 << 40), "document 20 starts at sequence 1099511627776 of 40"),
        (34 + 12 * 40 + 8 * 20, struct.pack("<q", 18), "document 20 starts at sequence 18 of 40"),
    ],
)
def test_damage_inside_an_index_is_found_before_submission(
    at: int, value: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "_BLOCK", 7)
    name = write_prefix(tmp_path / "text", random_documents(40))
    prefixes.Prefix.open(name).check_index()
    content = Path(f"{name}.idx").read_bytes()
    Path(f"{name}.idx").write_bytes(content[:at] + value + content[at + len(value) :])
    for check in (
        lambda: prefixes.check_data(DataConfig("indexed", prefix=name), plan().model, plan().batch, False),
        lambda: datasets(plan(), tmp_path, kind="indexed", prefix=name),
    ):
        with pytest.raises(DataError, match=r"text\.idx: damaged: " + message) as e:
            check()
        assert e.value.exit_code == 2


def resize(path: str, change: int) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:change] if change < 0 else content + bytes(change))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: Path(f"{p}.bin").unlink(), r"text\.bin: No such file"),
        (lambda p: Path(f"{p}.idx").unlink(), r"text\.idx: No such file"),
        (lambda p: resize(f"{p}.bin", -10), r"text\.bin: truncated: \d+ bytes, its index implies \d+"),
        (lambda p: resize(f"{p}.bin", 2), r"text\.bin: too long"),
        (lambda p: resize(f"{p}.idx", -8), r"text\.idx: truncated: \d+ bytes, its header implies \d+"),
        (lambda p: Path(f"{p}.idx").write_bytes(b"MMID"), r"text\.idx: truncated: 4 bytes"),
        (lambda p: Path(f"{p}.idx").write_bytes(bytes(200)), r"text\.idx: not an index"),
        (
            lambda p: Path(f"{p}.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 0)),
            "contains no text",
        ),
        (lambda p: write_prefix(Path(p), [[1] * 40]), r"has 2 samples of 16 tokens, a step takes 8"),
        (lambda p: write_prefix(Path(p), [[1] * 200, [257]]), r"token id 257 is not in the model's vocabulary of 257"),
    ],
)
def test_unusable_data_are_refused(damage: object, message: str, tmp_path: Path) -> None:
    name = write_prefix(tmp_path / "text", random_documents(40))
    damage(name)  # type: ignore[operator]
    with pytest.raises(DataError, match=message) as e:
        datasets(plan(), tmp_path, kind="indexed", prefix=name)
    assert "\n" not in str(e.value) and e.value.hint and e.value.exit_code == 2


@pytest.mark.parametrize("summary_vocab", [None, 100, VOCAB + 1])
def test_invalid_token_is_found_before_training(
    summary_vocab: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PREFIX.json may be missing, of other data, or have a larger vocabulary."""
    monkeypatch.setattr(prefixes, "_SCAN_BYTES", 64)
    documents = random_documents(40)
    name = write_prefix(tmp_path / "text", [*documents, [VOCAB]])
    tokens = sum(map(len, documents)) + 1
    if summary_vocab is not None:
        summary = {"vocab": summary_vocab, "tokens": tokens - (summary_vocab < VOCAB), "sequences": 41}
        Path(f"{name}.json").write_text(json.dumps(summary))
    with pytest.raises(DataError, match=f"token id {VOCAB} is not in the model's vocabulary of {VOCAB}"):
        datasets(plan(), tmp_path, kind="indexed", prefix=name)
    datasets(plan(vocab=VOCAB + 1), tmp_path, kind="indexed", prefix=name)
    with pytest.raises(DataError, match="token id"):  # the check for the larger vocabulary does not count
        datasets(plan(), tmp_path, kind="indexed", prefix=name)


def test_token_types_match_megatron() -> None:
    from megatron.core.datasets.indexed_dataset import DType

    integer_types = {d.value: d.dtype_from_code(d.value) for d in DType if not d.name.startswith("float")}
    assert integer_types == prefixes.TOKEN_TYPES


def test_describe_data_reports_tokens_and_epochs(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("some words " * 500)
    summary = prepare.prepare([tmp_path / "words.txt"], tmp_path / "words", workers=1)
    data = DataConfig("indexed", 7, summary.prefix, split="100")
    samples, _ = build_datasets(data, TrainConfig(), plan(), str(tmp_path))
    text = describe_data(data, samples, plan(), 100)
    assert f"words: {summary.tokens:,} tokens, {16 * len(samples):,} of them for training, vocabulary 257" in text
    assert f"100 steps use 12,800 tokens, {12800 / (16 * len(samples)):.3g} epochs" in text
    samples, _ = build_datasets(DataConfig("synthetic"), TrainConfig(), plan(), None)
    assert "random tokens, which cannot be learned" in describe_data(DataConfig("synthetic"), samples, plan(), 3)


def test_tokens_are_checked_once_and_prepared_ones_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(prefixes, "check_vocabulary", lambda tokens, vocab, where: checked.append(where))
    name = write_prefix(tmp_path / "text", random_documents(40))
    for _ in range(2):
        datasets(plan(), tmp_path, kind="indexed", prefix=name)
        assert len(checked) == 1
    (tmp_path / "words.txt").write_text("some words " * 500)
    prepare.prepare([tmp_path / "words.txt"], tmp_path / "words", workers=1)
    datasets(plan(), tmp_path / "other", kind="indexed", prefix=str(tmp_path / "words"))
    assert len(checked) == 1


def test_invalid_token_is_found_when_it_is_read() -> None:
    class Invalid(Synthetic):
        def tokens(self, index: int) -> np.ndarray:
            return super().tokens(index) + (index == 9) * VOCAB

    stream = batches(Invalid(1, VOCAB, 16), plan(), 0)
    with pytest.raises(DataError, match="token id"):
        for _ in range(8):
            next(stream)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "indexed", "prefix": [0.5, "a", "b"]}, "weight"),
        ({"kind": "indexed", "prefix": [0.5, "a", -1, "b"]}, "weights above 0"),
        ({"kind": "indexed", "prefix": "a", "split": "ninety"}, "'ninety' is no split"),
        ({"kind": "indexed", "prefix": "a", "split": "0,10"}, "'0,10' is no split"),
    ],
)
def test_invalid_options_are_refused(data: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        datasets(plan(), **data)


def test_most_learnable_tokens_follow_from_their_predecessor() -> None:
    t = Synthetic(3, 50, 400, learnable=True).tokens(5)
    assert t.min() >= 0 and t.max() < 50
    assert 0.8 < np.mean(t[1:] == (t[:-1] + 1) % 50) < 0.97


def _run_rank(rank: int, world: int, address: str, prefix: str, directory: str, vocab: int, results: object) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    try:
        p = plan(vocab=vocab)
        train, _ = datasets(p, Path(directory), kind="indexed", prefix=prefix)
        results.put((rank, [tuple(train.tokens(i)) for i in range(20)]))  # type: ignore[attr-defined]
    except DataError as e:
        results.put((rank, str(e)))  # type: ignore[attr-defined]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _run_ranks(ranks: int, tmp_path: Path, prefix: str, vocab: int) -> list[object]:
    import torch.multiprocessing as mp

    context = mp.get_context("fork")
    results = context.Queue()
    address = f"file://{tmp_path}/store-{vocab}"
    processes = [
        context.Process(target=_run_rank, args=(r, ranks, address, prefix, str(tmp_path), vocab, results))
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
    result_of_rank = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return [result_of_rank[r] for r in range(ranks)]


@pytest.mark.integration
def test_ranks_share_one_index_and_one_error(prefix: str, tmp_path: Path) -> None:
    samples = _run_ranks(3, tmp_path, prefix, VOCAB)
    assert isinstance(samples[0], list) and samples == [samples[0]] * 3
    assert len(list((tmp_path / "data").iterdir())) == 1
    errors = _run_ranks(3, tmp_path, prefix, 200)
    assert "not in the model's vocabulary of 200" in str(errors[0]) and errors == [errors[0]] * 3
