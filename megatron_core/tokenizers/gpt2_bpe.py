"""GPT-2's byte-level BPE from its two files, through the `tokenizers` library."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_core.errors import ConfigError
from megatron_core.tokenizers.base import canonical_json, digest
from megatron_core.tokenizers.byte_symbols import missing_bytes

END_OF_DOCUMENT = "<|endoftext|>"


class GPT2BPETokenizer:
    """GPT-2's `vocab.json` and `merges.txt`.

    `<|endoftext|>` in the text is encoded as ordinary text; only `eod` and `eos` give its id.
    """

    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        self._vocab_file = _existing("--vocab-file", vocab_file)
        self._merge_file = _existing("--merge-file", merge_file)
        self._tokenizer = _load(self._vocab_file, self._merge_file)
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.missing_bytes = missing_bytes(vocabulary, {}, {"type": "ByteLevel"})
        self.eod: int | None = vocabulary.get(END_OF_DOCUMENT)
        self.eos: int | None = self.eod

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text."""
        return self._tokenizer.encode(text).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, on all cores unless TOKENIZERS_PARALLELISM=false."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def fingerprint(self) -> str:
        """The digest of the vocabulary and of the merges in order."""
        return self._fingerprint

    def files(self) -> list[Path]:
        """The vocabulary file and the merges file."""
        return [self._vocab_file, self._merge_file]

    @cached_property
    def _fingerprint(self) -> str:
        vocabulary = json.loads(self._vocab_file.read_text(encoding="utf-8"))
        merges = self._merge_file.read_text(encoding="utf-8").splitlines()
        ranked = [line for line in merges if line and not line.startswith("#version")]
        return digest(b"gpt2 bpe", canonical_json(vocabulary), "\n".join(ranked).encode("utf-8"))


def _existing(flag: str, path: str | Path) -> Path:
    if not Path(path).is_file():
        raise ConfigError(
            f"{flag} {path}: there is no such file; GPT2BPETokenizer needs GPT-2's vocab.json and merges.txt"
        )
    return Path(path)


def _load(vocab_file: Path, merge_file: Path) -> tokenizers.Tokenizer:
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file} are no BPE vocabulary and merges: {error}"
        ) from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
