"""Fill in the middle: rearranges documents so that a model learns to write missing text inside a document."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.datasets.base import Dataset, Sample, sources_of
from megatron_core.datasets.build import Splits
from megatron_core.datasets.keyed_dataset import mix64
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.fill_in_the_middle.settings import FillInTheMiddleConfig
from megatron_core.tokenizers import Tokenizer
from megatron_core.training.data import DataPart, DataRequest

# Identifies each random draw of a document or fragment.
_REARRANGED, _SUFFIX_FIRST, _FIRST_CUT, _SECOND_CUT = range(4)

MARK = "\u263a"
"""A character that vocabularies do not merge with its neighbours."""
BROKEN = "\ufffd"
"""Replacement of bytes that are not a character, because a sample starts or ends within one."""


class FIMDataset:
    """A data set whose documents are rearranged, each with probability `fim_rate`.

    A document, the tokens between two end-of-document tokens, is cut at two points into prefix, middle and suffix. With
    the sentinel tokens P, S, M it becomes

        P prefix S suffix M middle    (PSM), or, with probability `fim_spm_rate`,
        P S suffix M prefix middle    (SPM).

    Cuts are between characters, not tokens, so that the model is trained on the partial words before a cursor, but not
    within an added token. Each piece is tokenized separately, middle and suffix without the space that some
    vocabularies put before a text. A sample keeps its L + 1 tokens: it is truncated, or padded with `fim_pad_token`. In
    a changed sample, loss_mask is 0 where the label is such padding and, with `eod_mask_loss`, where the token is the
    tokenizer's end of document, else 1.

    Documents that begin with `fim_no_prefix` or contain half a character are not changed. With `fim_split_sample`, a
    document that contains this token is chosen with probability `fim_rate`, and then each of its fragments is
    rearranged with probability `fim_fragment_rate`.

    All draws are functions of (seed, index, number of the document in the sample, number of the fragment in it).
    ConfigError: a token in the settings that the tokenizer does not have. Source: Bavarian et al. 2022, sections 3 and
    4.3; flags, arrangement and lengths as in Megatron-LM's GPTFIMDataset.
    """

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, config: RunConfig) -> None:
        settings = config.section(FillInTheMiddleConfig)
        self.sequence_length = dataset.sequence_length
        self._dataset: Any = dataset
        self.sources = sources_of(dataset)
        self._tokenizer = tokenizer
        self._settings = settings
        self._eod_mask_loss = config.data.eod_mask_loss
        self._seed = config.training.seed
        self._prefix, self._middle, self._suffix, self._pad = _sentinels(settings, tokenizer)
        self._eod = _eod(settings, tokenizer)
        split = settings.fim_split_sample
        self._border = None if split is None else _token_id(tokenizer, "fim_split_sample", split)
        # Tokens that the tokenizer puts before every text, such as begin-of-text; a piece must not have them.
        self._lead = tokenizer.tokenize("")
        added = sorted(getattr(tokenizer, "added_tokens", list)(), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")
        letter = tokenizer.tokenize("a")[len(self._lead) :]
        self._adds_space = tokenizer.detokenize([*letter, *letter]) != "aa"

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        sample = self._dataset[index]
        text = self._text(sample)
        rearranged = self._rearranged(text, index)
        if rearranged == text or len(text) < 2:
            return sample
        padded = np.full(self.sequence_length + 1, self._pad, dtype=np.int64)
        tokens = rearranged[: len(padded)]
        padded[: len(tokens)] = tokens
        loss_mask = (np.arange(1, len(padded)) < len(tokens)).astype(np.float32)
        if self._eod_mask_loss:
            loss_mask[padded[:-1] == self._tokenizer.eod] = 0.0
        return Sample(tokens=padded[:-1], labels=padded[1:], loss_mask=loss_mask)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in an epoch; ``AttributeError`` for a data set without epochs."""
        return int(self._dataset.samples_per_epoch)

    def source_of(self, index: int) -> int:
        """Number in `sources` of the data set of a sample."""
        return self._dataset.source_of(index)

    def _text(self, sample: Sample) -> list[int]:
        """The tokens and the last label, without trailing padding, whose labels do not count."""
        text = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        counts = sample["loss_mask"] != 0
        if self._eod_mask_loss:
            counts |= sample["tokens"] == self._tokenizer.eod
        return text[: 2 + int(np.flatnonzero(counts).max(initial=-1))]

    def _rearranged(self, text: list[int], index: int) -> list[int]:
        result: list[int] = []
        for number, document in enumerate(_runs(text, self._eod)):
            result += [self._eod] * bool(number) + self._document(document, (self._seed, index, number))
        return result

    def _document(self, tokens: list[int], key: tuple[int, ...]) -> list[int]:
        rate = self._settings.fim_rate
        if self._border is None or self._border not in tokens:
            return self._permuted(tokens, key) if _share(*key, _REARRANGED) < rate else tokens
        if _share(*key, _REARRANGED) >= rate:
            return tokens
        fragment_rate = self._settings.fim_fragment_rate
        assert fragment_rate is not None, "the configuration's rules ask for it with fim_split_sample"
        result: list[int] = []
        for number, fragment in enumerate(_runs(tokens, self._border)):
            fragment_key = (*key, number)
            chosen = _share(*fragment_key, _REARRANGED) < fragment_rate
            result += [self._border] * bool(number) + (self._permuted(fragment, fragment_key) if chosen else fragment)
        return result

    def _permuted(self, tokens: list[int], key: tuple[int, ...]) -> list[int]:
        """The rearranged document or fragment; unchanged if it cannot be rearranged."""
        lead = self._lead if self._lead and tokens[: len(self._lead)] == self._lead else []
        text = self._tokenizer.detokenize(tokens[len(lead) :])
        skipped = self._settings.fim_no_prefix
        if not text or BROKEN in text or (skipped is not None and text.startswith(skipped)):
            return tokens
        draws = (mix64(*key, cut) % (len(text) + 1) for cut in (_FIRST_CUT, _SECOND_CUT))
        first, second = sorted(self._before_added(text, cut) for cut in draws)
        prefix = self._tokenizer.tokenize(text[:first])[len(self._lead) :]
        middle, suffix = self._continued(text[first:second]), self._continued(text[second:])
        if _share(*key, _SUFFIX_FIRST) < self._settings.fim_spm_rate:
            return [*lead, self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        return [*lead, self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]

    def _before_added(self, text: str, cut: int) -> int:
        """The cut, or the beginning of the added token that it would divide."""
        spans = (match.span() for match in self._added.finditer(text))
        return next((begin for begin, end in spans if begin < cut < end), cut)

    def _continued(self, text: str) -> list[int]:
        """The tokens of a text that continues another one. Source: `encode_infilling` of Code Llama."""
        before = MARK if self._adds_space else ""
        return self._tokenizer.tokenize(before + text)[len(self._tokenizer.tokenize(before)) :]


def _runs(tokens: list[int], border: int) -> Iterator[list[int]]:
    """The runs between the border tokens, one more than there are borders."""
    start = 0
    for position, token in enumerate(tokens):
        if token == border:
            yield tokens[start:position]
            start = position + 1
    yield tokens[start:]


def _share(*key: int) -> float:
    """A uniform number in [0, 1)."""
    return (mix64(*key) >> 11) / 2.0**53


def _eod(settings: FillInTheMiddleConfig, tokenizer: Tokenizer) -> int:
    if settings.fim_eod_token is not None:
        return _token_id(tokenizer, "fim_eod_token", settings.fim_eod_token)
    if tokenizer.eod is None:
        raise ConfigError("--fim-data needs an end-of-document id, and the tokenizer has none; give --fim-eod-token")
    return tokenizer.eod


def _sentinels(settings: FillInTheMiddleConfig, tokenizer: Tokenizer) -> list[int]:
    """Ids of the prefix, middle, suffix and padding tokens."""
    names = [f"fim_{piece}_token" for piece in ("prefix", "middle", "suffix", "pad")]
    ids = [_token_id(tokenizer, name, getattr(settings, name)) for name in names]
    for number, name in enumerate(names):
        if ids[number] in ids[:number]:
            other = names[ids.index(ids[number])]
            raise ConfigError(f"{_flag(name)} and {_flag(other)} are both {getattr(settings, name)}; give two tokens")
    return ids


def _token_id(tokenizer: Tokenizer, setting: str, token: str) -> int:
    """The id of a string that the tokenizer encodes as a single token."""
    try:
        ids = [i for i in tokenizer.tokenize(token) if tokenizer.detokenize([i]).strip() == token]
    except DataError:  # NullTokenizer reads only numbers
        ids = []
    if len(ids) != 1:
        raise ConfigError(
            f"{_flag(setting)} {token}: the tokenizer does not have this token; choose another, or add it to "
            "the tokenizer's vocabulary"
        )
    return ids[0]


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")


class RearrangedData(DataPart):
    """Wraps the data sets of a run in ``FIMDataset``."""

    def change(self, splits: Splits, request: DataRequest) -> Splits:
        """See ``DataPart.change``."""
        tokenizer = request.tokenizer
        assert tokenizer is not None, "the feature's rules ask for one"
        return splits.map(lambda dataset: FIMDataset(dataset, tokenizer, request.config))
