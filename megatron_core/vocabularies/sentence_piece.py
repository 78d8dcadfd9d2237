"""SentencePiece models, such as Llama 2's."""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megatron_core.errors import ConfigError
from megatron_core.tokenizers.base import BaseTokenizer, Offsets
from megatron_core.vocabularies.companions import companion_files, other_vocabularies
from megatron_core.vocabularies.hugging_face import END_OF_TURN, generation_ends


class SentencePieceTokenizer(BaseTokenizer):
    """A SentencePiece `.model` file; its end-of-sentence id ends a document.

    add_bos: put the model's begin-of-sentence id before every text, as `llama2_tokenizer` does. `turn_ends` are
    further ids that end a generated text, as in `HuggingFaceTokenizer`.
    """

    def __init__(self, path: str | Path, add_bos: bool = False) -> None:
        self._path = Path(path)
        self.add_bos = add_bos
        self._processor = _load(self._path)
        if add_bos and self._processor.bos_id() < 0:
            raise ConfigError(
                f"--tokenizer-model {path} has no begin-of-sentence piece, which Llama2Tokenizer puts before "
                "each text; use --tokenizer-type SentencePieceTokenizer"
            )
        self.vocab_size = self._processor.get_piece_size()
        self.bos = _present(self._processor.bos_id())
        self.eos = _present(self._processor.eos_id())
        self.pad = _present(self._processor.pad_id())
        self.eod = self.eos
        self.declared_ends = generation_ends(self._path.parent)
        self.turn_ends = tuple(dict.fromkeys([*self.declared_ends, *self._ids_of(END_OF_TURN)]))
        control = filter(self._processor.is_control, range(self.vocab_size))
        self.special_as_text = [self._processor.id_to_piece(i) for i in control]

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text."""
        return self._processor.encode(text, out_type=int, add_bos=self.add_bos)

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """The token ids of one text, and the characters of each; a begin-of-sentence id has none."""
        encoded = self._processor.encode(text, out_type="offset_mapping")
        bos = [self._processor.bos_id()] * self.add_bos
        return bos + encoded["ids"], [(0, 0)] * len(bos) + encoded["offsets"]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, in one thread: preprocessing uses several processes instead."""
        return self._processor.encode(list(texts), out_type=int, add_bos=self.add_bos, num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids; control pieces (begin and end of sentence) give no text."""
        return self._processor.decode([int(i) for i in ids])

    def entries(self) -> dict[int, str]:
        """The pieces by their ids."""
        return {number: self._processor.id_to_piece(number) for number in range(self.vocab_size)}

    def files(self) -> list[Path]:
        """The model file, and the files that `transformers` stores next to it."""
        return [self._path, *companion_files(self._path.parent), *other_vocabularies(self._path)]

    def _ids_of(self, pieces: Sequence[str]) -> list[int]:
        """The ids of those pieces that the model has."""
        ids = map(self._processor.piece_to_id, pieces)
        return [i for piece, i in zip(pieces, ids, strict=True) if self._processor.id_to_piece(i) == piece]

    def _identity(self) -> Sequence[bytes]:
        return b"sentencepiece", self._path.read_bytes(), b"bos" if self.add_bos else b""


def _present(piece: int) -> int | None:
    """The id of a control piece; None if the model has no such piece (-1 in the library)."""
    return piece if piece >= 0 else None


def _load(path: Path) -> sentencepiece.SentencePieceProcessor:
    if not path.is_file():
        raise ConfigError(f"--tokenizer-model {path}: no such file; give a SentencePiece .model file")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError, ValueError) as error:  # its messages may quote bytes that are not UTF-8
        reason = " ".join(str(error).split())
        raise ConfigError(f"--tokenizer-model {path} is not a SentencePiece model: {reason}") from error


def llama2_tokenizer(path: str | Path) -> SentencePieceTokenizer:
    """A SentencePiece model whose texts begin with its `bos`, as in Megatron-LM's `Llama2Tokenizer` before 0.16."""
    return SentencePieceTokenizer(path, add_bos=True)
