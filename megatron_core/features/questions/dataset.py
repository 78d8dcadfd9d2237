"""Multiple-choice questions as samples: one for each choice, whose counted tokens are those of the choice."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_core.datasets.base import Sample, checked_text
from megatron_core.errors import DataError
from megatron_core.tokenizers import Tokenizer


class ChoiceDataset:
    """JSON Lines with ``query``, ``choices`` and ``gold``, the index of the correct choice.

    Item i is the i-th choice of all questions in turn; after the last one, samples without counted tokens. A choice
    follows its query directly, so that it usually begins with a space. Both are tokenized together, with white space at
    the end of the query as a part of the choice; too long texts lose tokens at their beginning, as in lm-eval.
    Errors: ``DataError``.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.gold: list[int] = []
        """The correct choice of each question."""
        self.lengths: list[list[int]] = []
        """The number of characters of each choice of each question, without a space at its beginning: lm-eval divides
        by the length of the choice without its ``target_delimiter``, which is a space."""
        self._tokens: list[tuple[list[int], int]] = []
        self._tokenizer = tokenizer
        self._padding = next((i for i in (tokenizer.pad, tokenizer.eod) if i is not None), 0)
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # texts may contain other line separators
        except (OSError, ValueError) as error:
            raise DataError(f"choices_data_path={path} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    self._add(json.loads(line))
                except (ValueError, TypeError, KeyError, RecursionError, DataError) as error:
                    raise DataError(
                        f"{path}, line {number}: {error}; a line is "
                        '{"query": "2 + 2 =", "choices": [" 3", " 4"], "gold": 1}'
                    ) from None
        if not self.gold:
            raise DataError(f"choices_data_path={path} has no questions")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Sample:
        ids, counted = self._tokens[index % len(self._tokens)]
        size = self.sequence_length
        ids = ids[-size - 1 :]
        counted = 0 if index >= len(self._tokens) else min(counted, len(ids) - 1)
        mask = np.zeros(size, dtype=np.float32)
        mask[len(ids) - 1 - counted : len(ids) - 1] = 1.0
        filled = np.array(ids + [self._padding] * (size + 1 - len(ids)), dtype=np.int64)
        return {"tokens": filled[:-1], "labels": filled[1:], "loss_mask": mask}

    def _add(self, line: Any) -> None:
        query = checked_text(line["query"], "query")
        choices = line["choices"]
        gold = line["gold"]
        if not isinstance(choices, list) or len(choices) < 2:
            raise DataError("choices must be a list of two or more strings")
        if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
            raise DataError(f"gold={gold!r} must be an index of choices, from 0 to {len(choices) - 1}")
        self._tokens += [self._encoded(query, checked_text(choice, "choices")) for choice in choices]
        self.gold.append(gold)
        self.lengths.append([len(choice.removeprefix(" ")) for choice in choices])

    def _encoded(self, query: str, choice: str) -> tuple[list[int], int]:
        """The tokens of a query and a choice, and the number of tokens of the choice."""
        question = query.rstrip()
        tokens = self._tokenizer.tokenize(query + choice)
        if not question:  # the first token is predicted from the one that ends the document before it
            start = next((i for i in (self._tokenizer.eod, self._tokenizer.bos) if i is not None), None)
            if start is None:
                raise DataError("query is empty, and the tokenizer has no token before the first one; give a query")
            return [start, *tokens], len(tokens)
        counted = len(tokens) - len(self._tokenizer.tokenize(question))
        if counted < 1:
            raise DataError(f"the choice {choice!r} adds no tokens to its query")
        return tokens, counted
