"""Fill in the middle: the output is a rearrangement of the input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.config import RunConfig
from megatron_core.datasets import Sample
from megatron_core.datasets.base import WholeRound
from megatron_core.datasets.loader import BatchLoader
from megatron_core.errors import ConfigError
from megatron_core.features.fill_in_the_middle.dataset import FIMDataset
from megatron_core.tokenizers import Tokenizer, build_tokenizer
from tests.vocabularies.corpus import TEXTS, write_tokenizer_json

SENTINELS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
EOD = "<|endoftext|>"


class Documents:
    """Item i is the whole i-th text; the mask counts all tokens except those in `masked`."""

    def __init__(self, texts: Sequence[Sequence[int]], masked: Sequence[int] = ()) -> None:
        self.texts = [np.array(text, dtype=np.int64) for text in texts]
        self.sequence_length = len(texts[0]) - 1
        self.masked = masked

    def __getitem__(self, index: int) -> Sample:
        text = self.texts[index % len(self.texts)]
        mask = np.ones(len(text) - 1, dtype=np.float32)
        mask[list(self.masked)] = 0.0
        return Sample(tokens=text[:-1], labels=text[1:], loss_mask=mask)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE with all default special tokens and a file separator."""
    path = write_tokenizer_json(tmp_path_factory.mktemp("fim"), (EOD, *SENTINELS, "<file>"))
    return build_tokenizer("HuggingFaceTokenizer", path)


def sample_of(texts: Sequence[str], tokenizer: Tokenizer, room: int = 0) -> list[int]:
    """Documents, each with an end, followed by `room` more ends, which are empty documents."""
    return [i for text in texts for i in [*tokenizer.tokenize(text), tokenizer.eod]] + [tokenizer.eod] * room


def runs(ids: Sequence[int], border: int) -> list[list[int]]:
    """The runs between the borders."""
    result: list[list[int]] = [[]]
    for i in ids:
        if i == border:
            result.append([])
        else:
            result[-1].append(i)
    return result


def restored(ids: list[int], tokenizer: Tokenizer) -> tuple[str, str]:
    """The arrangement of a document or fragment, read from its sentinels, and its text in the original order."""
    prefix, middle, suffix, _ = (tokenizer.tokenize(name)[0] for name in SENTINELS)
    positions = {i: ids.index(i) for i in (prefix, middle, suffix) if i in ids}
    if not positions:
        return "plain", tokenizer.detokenize(ids)
    assert len(positions) == 3 and ids[0] == prefix and sum(i in positions for i in ids) == 3
    text = lambda start, stop=None: tokenizer.detokenize(ids[start:stop])  # noqa: E731
    after_suffix, after_middle = text(positions[suffix] + 1, positions[middle]), text(positions[middle] + 1)
    if positions[suffix] == 1:
        # PSM with an empty prefix is indistinguishable, and gives the same text.
        return "SPM", after_middle + after_suffix
    return "PSM", text(1, positions[suffix]) + after_middle + after_suffix


def text_of(sample: Sample) -> list[int]:
    """All L + 1 tokens."""
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


def wrapped(texts: Sequence[Sequence[int]], tokenizer: Tokenizer, seed: int = 5, **settings: object) -> FIMDataset:
    config = RunConfig.from_flat({"fim_data": True, "seed": seed, **settings})
    return FIMDataset(Documents(texts), tokenizer, config)


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**64),
)
def test_rearranged_text_puts_together_to_the_original(
    tokenizer: Tokenizer, texts: list[str], spm_rate: float, seed: int
) -> None:
    ends = 200 * len(texts)  # room, so that nothing is cut off
    dataset = wrapped([sample_of(texts, tokenizer, ends)], tokenizer, seed, fim_rate=1.0, fim_spm_rate=spm_rate)
    found = runs(text_of(dataset[0]), tokenizer.eod)
    for document, text in zip(found, texts, strict=False):
        kind, original = restored(document, tokenizer)
        assert original == text
        assert kind in (("plain",) if not text else ("PSM", "SPM") if spm_rate < 1 else ("SPM",))


def test_an_epoch_has_an_end_only_if_the_data_set_has_one(tokenizer: Tokenizer) -> None:
    dataset = wrapped([tokenizer.tokenize(TEXTS[0])], tokenizer)
    assert not hasattr(dataset, "samples_per_epoch")
    dataset._dataset.samples_per_epoch = 3
    assert len(WholeRound(dataset)) == 3


def test_rate_zero_is_the_identity(tokenizer: Tokenizer) -> None:
    texts = [sample_of(TEXTS, tokenizer)]
    source = Documents(texts, masked=[0, 3])
    dataset = FIMDataset(source, tokenizer, RunConfig.from_flat({"fim_rate": 0.0}))
    for name, values in dataset[7].items():
        assert np.array_equal(values, source[7][name])
        assert values.dtype == source[7][name].dtype


@pytest.mark.parametrize(("rate", "spm_rate"), [(0.5, 0.5), (0.9, 0.2), (0.25, 1.0)])
def test_shares_are_near_the_rates(tokenizer: Tokenizer, rate: float, spm_rate: float) -> None:
    dataset = wrapped(
        [sample_of(["one text of many words"] * 8, tokenizer, 60)], tokenizer, fim_rate=rate, fim_spm_rate=spm_rate
    )
    kinds = [restored(d, tokenizer)[0] for i in range(300) for d in runs(text_of(dataset[i]), tokenizer.eod)[:8]]
    chosen = len(kinds) - kinds.count("plain")
    assert chosen / len(kinds) == pytest.approx(rate, abs=4 * (rate * (1 - rate) / len(kinds)) ** 0.5)
    # Both of the two cuts of n characters are 0, and the prefix empty, with probability about 2 / (n + 1).
    empty_prefix = (1 - spm_rate) * 2 / 23
    assert kinds.count("SPM") / chosen == pytest.approx(spm_rate + empty_prefix, abs=4 * (0.25 / chosen) ** 0.5)


def test_cuts_lie_everywhere_and_between_characters(tokenizer: Tokenizer) -> None:
    text = "Gr\u00fc\u00dfe"
    dataset = wrapped([sample_of([text], tokenizer, 30)], tokenizer, fim_rate=1.0, fim_spm_rate=0.0)
    middle, suffix = (tokenizer.tokenize(name)[0] for name in SENTINELS[1:3])
    seen = set()
    for index in range(600):
        (document, *_) = runs(text_of(dataset[index]), tokenizer.eod)
        first, second = document.index(suffix), document.index(middle)
        pieces = [tokenizer.detokenize(part) for part in (document[1:first], document[second + 1 :])]
        seen.add((len(pieces[0]), len(pieces[0]) + len(pieces[1])))
    assert seen == {(a, b) for a in range(6) for b in range(a, 6)}


def test_a_sample_is_a_pure_function_of_seed_and_index(tokenizer: Tokenizer) -> None:
    texts = [sample_of(TEXTS, tokenizer)]
    forward, backward = wrapped(texts, tokenizer), wrapped(texts, tokenizer)
    expected = [text_of(forward[i]) for i in range(20)]
    assert [text_of(backward[i]) for i in reversed(range(20))] == expected[::-1]  # C30
    assert len({tuple(text) for text in expected}) > 10, "the same text is rearranged differently at every position"
    assert [text_of(wrapped(texts, tokenizer, seed=6)[i]) for i in range(20)] != expected


def test_every_layout_reads_the_same(tokenizer: Tokenizer) -> None:
    texts = [sample_of(TEXTS, tokenizer)]
    alone = BatchLoader(wrapped(texts, tokenizer), 8, 0, 1, tokenizer.vocab_size).step(16, 1)[0]["tokens"].tolist()
    split = [
        row
        for rank in range(2)
        for batch in BatchLoader(wrapped(texts, tokenizer), 4, rank, 2, tokenizer.vocab_size).step(16, 1)
        for row in batch["tokens"].tolist()
    ]
    assert split == alone  # C31


def test_the_length_is_kept_by_cutting_the_end(tokenizer: Tokenizer) -> None:
    texts = [sample_of(TEXTS, tokenizer)[:-1]]
    dataset = wrapped(texts, tokenizer, fim_rate=1.0)
    roomy = wrapped([[*texts[0], *[tokenizer.eod] * 40]], tokenizer, fim_rate=1.0)
    for index in range(10):
        found = text_of(dataset[index])
        assert len(found) == len(texts[0])
        assert found == text_of(roomy[index])[: len(found)]
        assert dataset[index]["loss_mask"].tolist() == [1.0] * (len(found) - 1)


def test_what_got_shorter_is_filled_up_and_masked(tokenizer: Tokenizer) -> None:
    """Text that was tokenized byte by byte takes fewer tokens when it is tokenized again."""
    pad = tokenizer.tokenize("<fim_pad>")[0]
    text = [i for c in "the cat and the hat " * 4 for i in tokenizer.tokenize(c)]
    dataset = wrapped([text], tokenizer, fim_rate=1.0)
    sample = dataset[0]
    found = text_of(sample)
    kept = found.index(pad)
    assert restored(found[:kept], tokenizer)[1] == "the cat and the hat " * 4
    assert set(found[kept:]) == {pad} and len(found) == len(text)
    assert sample["loss_mask"].tolist() == [1.0] * (kept - 1) + [0.0] * (len(text) - kept)


def test_the_mask_follows_the_new_tokens(tokenizer: Tokenizer) -> None:
    texts = [sample_of(TEXTS, tokenizer)]
    for masked in (True, False):
        sample = wrapped(texts, tokenizer, fim_rate=1.0, eod_mask_loss=masked)[1]
        ends = sample["tokens"] == tokenizer.eod
        assert ends.any()
        assert ((sample["loss_mask"] == 0) == (ends if masked else False)).all()


def test_padding_of_the_source_stays_behind(tokenizer: Tokenizer) -> None:
    """A source may pad its last sample; padding is not rearranged."""
    real = tokenizer.tokenize("a text that ends before its sample does")
    pad = tokenizer.tokenize("<fim_pad>")[0]
    for filler in (tokenizer.eod, 99):
        source = Documents([[*real, *[filler] * 30]], masked=range(len(real) - 1, len(real) + 29))
        sample = FIMDataset(source, tokenizer, RunConfig.from_flat({"fim_rate": 1.0}))[0]
        found = text_of(sample)
        kept = found.index(pad)
        assert restored(found[:kept], tokenizer)[1] == tokenizer.detokenize(real)
        assert sample["loss_mask"].tolist() == [1.0] * (kept - 1) + [0.0] * (len(found) - kept)
    nothing = Documents([[*real]], masked=range(len(real) - 1))
    assert text_of(FIMDataset(nothing, tokenizer, RunConfig.from_flat({"fim_rate": 1.0}))[0]) == real


def test_documents_that_stay_as_they_are(tokenizer: Tokenizer) -> None:
    half = tokenizer.tokenize("\u4e2d and more")[1:]
    assert tokenizer.detokenize(half).startswith("\ufffd")
    texts = ["#! keep", "change"]
    dataset = wrapped(
        [[*half, tokenizer.eod, tokenizer.eod, *sample_of(texts, tokenizer, 30)]],
        tokenizer,
        fim_rate=1.0,
        fim_no_prefix="#!",
    )
    broken, empty, kept, changed, *_ = runs(text_of(dataset[0]), tokenizer.eod)
    assert broken == half and empty == []
    assert kept == tokenizer.tokenize("#! keep")
    assert restored(changed, tokenizer) != ("plain", "change")


def test_fragments_are_rearranged_on_their_own(tokenizer: Tokenizer) -> None:
    border = tokenizer.tokenize("<file>")[0]
    files = ["first file", "second file", "", "third"]
    text = [i for file in files for i in [*tokenizer.tokenize(file), border]][:-1]
    settings = {"fim_split_sample": "<file>", "fim_spm_rate": 0.0}
    source = [[*text, *[tokenizer.eod] * 40]]
    for rates, chosen in (((1.0, 1.0), True), ((1.0, 0.0), False), ((0.0, 1.0), False)):
        dataset = wrapped(source, tokenizer, fim_rate=rates[0], fim_fragment_rate=rates[1], **settings)
        found = runs(runs(text_of(dataset[0]), tokenizer.eod)[0], border)
        assert [restored(fragment, tokenizer)[1] for fragment in found] == files
        assert [restored(fragment, tokenizer)[0] != "plain" for fragment in found] == [
            chosen and file != "" for file in files
        ]
    some = wrapped(source, tokenizer, fim_rate=0.5, fim_fragment_rate=0.5, **settings)
    first = [restored(runs(text_of(some[i]), border)[0], tokenizer)[0] != "plain" for i in range(400)]
    assert np.mean(first) == pytest.approx(0.25, abs=0.1)


def test_a_begin_of_text_id_stays_at_the_beginning(tmp_path: Path) -> None:
    """Llama2Tokenizer puts one before every text; pieces must not have it."""
    (tmp_path / "text.txt").write_text(
        "\n".join(line for text in TEXTS * 20 for line in text.splitlines() if line.strip())
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "model"), vocab_size=330, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", minloglevel=2, hard_vocab_limit=False,
        remove_extra_whitespaces=False, user_defined_symbols=list(SENTINELS),
    )  # fmt: skip
    tokenizer = build_tokenizer("Llama2Tokenizer", tmp_path / "model.model")
    (begin,) = tokenizer.tokenize("")
    text = tokenizer.tokenize("the cat and the hat")
    dataset = wrapped([[*text, *[tokenizer.eod] * 20]], tokenizer, fim_rate=1.0, fim_spm_rate=0.0)
    ids = {i: tokenizer.detokenize([i]) for i in range(tokenizer.vocab_size)}
    prefix, middle, suffix, _ = (next(i for i, name in ids.items() if name == s) for s in SENTINELS)
    for index in range(20):
        document = runs(text_of(dataset[index]), tokenizer.eod)[0]
        assert document[:2] == [begin, prefix] and document.count(begin) == 1
        first, second = document.index(suffix), document.index(middle)
        in_order = [*document[2:first], *document[second + 1 :], *document[first + 1 : second]]
        assert tokenizer.detokenize(in_order) == "the cat and the hat"  # no space before middle and suffix


def test_added_tokens_are_not_cut(tokenizer: Tokenizer) -> None:
    text = tokenizer.tokenize("one<file>two<file>three")
    dataset = wrapped([[*text, *[tokenizer.eod] * 20]], tokenizer, fim_rate=1.0)
    documents = [runs(text_of(dataset[index]), tokenizer.eod)[0] for index in range(50)]
    assert all(document.count(tokenizer.tokenize("<file>")[0]) == 2 for document in documents)
    assert {restored(document, tokenizer)[1] for document in documents} == {"one<file>two<file>three"}


def test_tokens_that_the_tokenizer_does_not_have(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = [sample_of(["a"], tokenizer)]
    for name in ("prefix", "middle", "suffix", "pad", "eod"):
        with pytest.raises(ConfigError, match=f"--fim-{name}-token <none>: the tokenizer does not have this token"):
            wrapped(text, tokenizer, **{f"fim_{name}_token": "<none>"})
    with pytest.raises(ConfigError, match="--fim-split-sample <none>"):
        wrapped(text, tokenizer, fim_split_sample="<none>", fim_fragment_rate=0.5)
    with pytest.raises(ConfigError, match="--fim-suffix-token and --fim-prefix-token are both <fim_prefix>"):
        wrapped(text, tokenizer, fim_suffix_token="<fim_prefix>")
    for kind in ("ByteLevelTokenizer", "NullTokenizer"):
        with pytest.raises(ConfigError, match="--fim-prefix-token <fim_prefix>"):
            wrapped(text, build_tokenizer(kind, vocab_size=300))
    without = build_tokenizer("HuggingFaceTokenizer", write_tokenizer_json(tmp_path, SENTINELS))
    with pytest.raises(ConfigError, match="--fim-eod-token"):
        wrapped(text, without)


def test_another_token_may_end_documents(tokenizer: Tokenizer) -> None:
    border = tokenizer.tokenize("<file>")[0]
    text = [*tokenizer.tokenize("one two"), border, *tokenizer.tokenize("three"), *[border] * 30]
    found = runs(text_of(wrapped([text], tokenizer, fim_rate=1.0, fim_eod_token="<file>")[0]), border)
    assert [restored(document, tokenizer)[1] for document in found[:2]] == ["one two", "three"]
    assert all(restored(document, tokenizer)[0] != "plain" for document in found[:2])
