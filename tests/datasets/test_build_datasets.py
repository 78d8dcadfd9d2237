"""From the data flags to the splits, and the errors about invalid flags and files."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron_core.config import RunConfig
from megatron_core.datasets import BlendedDataset, DatasetHeader, IndexedDataset, KeyedGPTDataset, Splits
from megatron_core.datasets import build_datasets as build
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.megatron_order.part import MegatronOrder
from megatron_core.preprocess.builder import write_header
from megatron_core.tokenizers import ByteLevelTokenizer, NullTokenizer, Tokenizer
from tests.datasets.files import write, write_counting


def build_datasets(
    *,
    sequence_length: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
    wanted: dict[str, int] | None = None,
    **flags: object,
) -> Splits:
    """The splits of the given flags."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    config = RunConfig.from_flat({"seq_length": sequence_length, "seed": seed, **given})
    order = MegatronOrder(config, wanted or {}) if config.data.data_order == "megatron" else None
    return build(config.data, seed=seed, tokenizer=tokenizer, order=order)


def test_default_split(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [20] * 1000)
    splits = build_datasets(data_path=[prefix], sequence_length=8, seed=3)
    assert splits.notes == ()
    indexed = IndexedDataset(prefix)
    for dataset, sequences in zip(
        (splits.train, splits.valid, splits.test),
        (range(969), range(969, 999), range(999, 1000)),
        strict=True,
    ):
        expected = KeyedGPTDataset(indexed, sequences, 8, seed=3)
        assert dataset.samples_per_epoch == expected.samples_per_epoch
        np.testing.assert_equal(dataset[1], expected[1])


def test_zero_share_and_too_few_tokens(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [20] * 40)
    splits = build_datasets(data_path=[prefix], sequence_length=30, seed=3, split="97,3,0")
    assert splits.test is None
    assert splits.valid is None
    assert len(splits.notes) == 1 and "the valid split has 20 tokens" in splits.notes[0]
    with pytest.raises(DataError, match="the train split has 780 tokens"):
        build_datasets(data_path=[prefix], sequence_length=780, seed=3, split="97,3,0")


def test_blend_with_weights(tmp_path: Path) -> None:
    prefixes = [write_counting(tmp_path / name, [20] * 100) for name in "ab"]
    data_path = ["3", prefixes[0], "1", prefixes[1]]
    splits = build_datasets(data_path=data_path, sequence_length=8, seed=3, split="1,1,0")
    assert isinstance(splits.train, BlendedDataset) and isinstance(splits.valid, BlendedDataset)
    assert splits.train.slots == (49152, 16384)


def test_a_file_too_small_for_validation_leaves_the_others(tmp_path: Path) -> None:
    large = write_counting(tmp_path / "large", [20] * 100)
    small = write_counting(tmp_path / "small", [20] * 3)
    data_path = ["1", large, "1", small, "2", large]
    splits = build_datasets(data_path=data_path, sequence_length=8, seed=3, split="9,1,0")
    assert splits.train.slots == (16384, 16384, 32768)
    assert splits.valid.slots == (21845, 43691)
    assert "small" in splits.notes[0]


def test_own_paths(tmp_path: Path) -> None:
    prefixes = [write_counting(tmp_path / name, [50]) for name in "abc"]
    splits = build_datasets(train_data_path=prefixes[:2], valid_data_path=prefixes[2:], sequence_length=8, seed=3)
    assert isinstance(splits.train, BlendedDataset)
    assert splits.valid.samples_per_epoch == 6
    assert splits.test is None
    with pytest.raises(DataError, match="the train split has 50 tokens"):
        build_datasets(train_data_path=prefixes[:2], valid_data_path=prefixes[2:], sequence_length=50, seed=3)


def test_flags_that_exclude_each_other() -> None:
    sizes = {"sequence_length": 8, "seed": 3}
    with pytest.raises(ConfigError, match="data_path=a and train_data_path=b exclude one another"):
        build_datasets(data_path=["a"], train_data_path=["b"], **sizes)
    with pytest.raises(ConfigError, match="split=1,1,1 applies only to data_path"):
        build_datasets(train_data_path=["b"], split="1,1,1", **sizes)
    with pytest.raises(ConfigError, match="give one of --data-path, --train-data-path, --mock-data"):
        build_datasets(**sizes)
    with pytest.raises(ConfigError, match="--eod-mask-loss needs a tokenizer"):
        build_datasets(data_path=["a"], eod_mask_loss=True, **sizes)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.bin and .*absent\.idx"):
        build_datasets(data_path=[str(tmp_path / "absent")], sequence_length=8, seed=3)


def test_tokenizer_is_checked_and_its_end_masked(tmp_path: Path) -> None:
    tokenizer = ByteLevelTokenizer()
    prefix = write(tmp_path / "a", [[*b"hello", 256]] * 10)
    header = DatasetHeader(
        tokenizer_type="ByteLevelTokenizer",
        fingerprint=tokenizer.fingerprint(),
        vocab_size=257,
        eod=256,
        append_eod=True,
        documents=10,
        tokens=60,
    )
    write_header(prefix, header)
    splits = build_datasets(
        data_path=[prefix], split="1", sequence_length=6, seed=3, tokenizer=tokenizer, eod_mask_loss=True
    )
    assert splits.train[0]["loss_mask"].sum() == 5
    with pytest.raises(DataError, match="of 257 tokens, but --vocab-size is 256; give at least"):
        build_datasets(data_path=[prefix], split="1", sequence_length=6, seed=3, vocab_size=256)
    assert build_datasets(data_path=[prefix], split="1", sequence_length=6, seed=3, vocab_size=257).train is not None
    with pytest.raises(DataError, match="tokenizer of this run has 99"):
        build_datasets(data_path=[prefix], split="1", sequence_length=6, seed=3, tokenizer=NullTokenizer(99))


def test_paths_in_files_are_those_on_the_command_line(tmp_path: Path) -> None:
    a, b, c = (write_counting(tmp_path / name, [20] * 100) for name in "abc")
    (tmp_path / "all.txt").write_text(f"3 {a}\n1 {b}\n")
    splits = build_datasets(data_args_path=str(tmp_path / "all.txt"), sequence_length=8, seed=3, split="1,1,0")
    assert splits.train.slots == splits.valid.slots == (49152, 16384)
    each = {"train": f"1 {a} 3 {b}", "valid": [c], "test": None}
    (tmp_path / "each.json").write_text(json.dumps(each))
    splits = build_datasets(per_split_data_args_path=str(tmp_path / "each.json"), sequence_length=8, seed=3)
    assert splits.train.slots == (16384, 49152)
    assert splits.valid.samples_per_epoch == 249 and splits.test is None


@pytest.mark.parametrize(
    ("flag", "content", "sentence"),
    [
        ("data_args_path", None, "data_args_path=.*given cannot be read"),
        ("per_split_data_args_path", "{", "is not JSON .*expected an object such as"),
        ("per_split_data_args_path", "[1]", "given contains list; expected an object"),
        ("per_split_data_args_path", '{"train": ["a"], "eval": ["b"]}', "contains train, eval; expected"),
        ("per_split_data_args_path", '{"valid": ["a"]}', "contains valid; expected an object"),
        ("per_split_data_args_path", '{"train": [["a"]]}', r"train is \[\['a'\]\]; expected a list"),
    ],
)
def test_files_of_flags_that_are_misformed(flag: str, content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "given").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        build_datasets(**{flag: str(tmp_path / "given")}, sequence_length=8, seed=3)


def test_threads_change_nothing(tmp_path: Path) -> None:
    paths = [write_counting(tmp_path / f"{i}", [20] * (10 + i), start=1000 * i) for i in range(9)]
    one, four = (
        build_datasets(data_path=paths, sequence_length=8, seed=3, num_dataset_builder_threads=n).train for n in (1, 4)
    )
    for i in range(50):
        np.testing.assert_equal(one[i], four[i])


def test_rounds_over_one_epoch(tmp_path: Path) -> None:
    paths = [write_counting(tmp_path / "a", [81]), write_counting(tmp_path / "b", [41], start=1000)]
    single, cyclic = (
        build_datasets(data_path=paths, sequence_length=8, seed=3, split="1", dataloader_type=kind).train
        for kind in ("single", "cyclic")
    )
    first = [tuple(single[i]["tokens"]) for i in range(15)]
    rounds = [[tuple(cyclic[i]["tokens"]) for i in range(15 * k, 15 * k + 15)] for k in range(3)]
    assert all(sorted(each) == sorted(first) for each in rounds)
    assert len({tuple(each) for each in [first, *rounds]}) == 4


def test_megatrons_order_is_that_of_its_builder(tmp_path: Path) -> None:
    """Through the flags, and through Megatron's own classes: the same samples of a blend, split by split."""
    a, b = write_counting(tmp_path / "a", [37] * 90), write_counting(tmp_path / "b", [53] * 40, start=9000)
    tokenizer, paths, wanted = NullTokenizer(20000), ["0.3", a, "0.7", b], {"train": 400, "valid": 60, "test": 20}
    splits = build_datasets(
        data_path=paths, split="90,8,2", sequence_length=16, seed=7, data_order="megatron", wanted=wanted,
        tokenizer=tokenizer, data_cache_path=str(tmp_path / "cache"), num_dataset_builder_threads=2,
    )  # fmt: skip
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=16, blend=get_blend_from_list(paths), split="90,8,2", tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    built = BlendedMegatronDatasetBuilder(GPTDataset, list(wanted.values()), lambda: True, config).build()
    for name, theirs in zip(wanted, built, strict=True):
        ours = getattr(splits, name)
        assert len(ours) == len(theirs) >= wanted[name]
        for i in range(len(ours)):
            for key in ("tokens", "labels", "loss_mask"):
                np.testing.assert_array_equal(ours[i][key], theirs[i][key].numpy())
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} >= {".npy"}
    with pytest.raises(DataError, match=r"--train-iters or --train-samples.*--data-order keyed"):
        splits.train[len(splits.train)]


def test_megatrons_order_leaves_out_what_has_too_few_tokens(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [20] * 40)
    flags = {"data_path": [prefix], "split": "98,1,1", "sequence_length": 30, "seed": 3, "data_order": "megatron"}
    splits = build_datasets(**flags)
    assert splits.train is not None and splits.valid is None and splits.test is None
    assert len(splits.notes) == 2 and "the valid split has 20 tokens" in splits.notes[0]


def test_a_header_of_other_files_is_told(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [20] * 10)
    for name, said in (("documents", 9), ("tokens", 199)):
        counts = {"documents": 10, "tokens": 200, name: said}
        header = DatasetHeader.of(NullTokenizer(300), "NullTokenizer", append_eod=False, **counts)
        write_header(prefix, header)
        with pytest.raises(DataError, match=rf"a\.json says {name}={said}, but the files have .*copy all three files"):
            build_datasets(data_path=[prefix], sequence_length=8, seed=3)


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_tokens_of_a_dtype_with_fractions_are_refused(order: str, tmp_path: Path) -> None:
    """An index with the dtype code of float32 over int32 tokens would be read as ids of 0."""
    prefix = write_counting(tmp_path / "a", [20] * 10)
    index = tmp_path / "a.idx"
    content = bytearray(index.read_bytes())
    content[17] = 7
    index.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.idx has the dtype float32, but token ids must be integers"):
        build_datasets(data_path=[prefix], sequence_length=8, seed=3, data_order=order)
