"""The base class of a caller's tokenizer in programs for Megatron Core up to 0.13."""

import json
from abc import ABC, abstractmethod
from typing import Any, NoReturn

_OPTIONAL = ("cls", "sep", "pad", "eod", "bos", "eos", "mask")


class MegatronLegacyTokenizer(ABC):
    """A tokenizer defines ``tokenize``, ``vocab``, ``inv_vocab`` and ``vocab_size``.

    ``unique_identifiers`` has the class, the paths and the options as text. Ids that a class does not define raise
    NotImplementedError.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        options = {name: str(value) for name, value in tokenizer_options.items()}
        self.unique_identifiers = {"class": type(self).__name__, "tokenizer_path": list(tokenizer_paths)} | options
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @abstractmethod
    def tokenize(self, text: str) -> Any:
        """Return the ids of a text."""

    @property
    @abstractmethod
    def vocab(self) -> Any:
        """The id of each token."""

    @property
    @abstractmethod
    def inv_vocab(self) -> Any:
        """The token of each id."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of ids."""

    def detokenize(self, ids: Any) -> str:
        """Return the text of ids."""
        self._missing("method 'detokenize'")

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Return the position of each token in ``text``."""
        self._missing("method 'offsets'")

    def _missing(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {name}")


def _optional(name: str) -> property:
    return property(lambda self: self._missing(f"attribute {name!r}"), doc=f"The id of the token {name!r}.")


for _name in _OPTIONAL:
    setattr(MegatronLegacyTokenizer, _name, _optional(_name))
MegatronTokenizer = MegatronLegacyTokenizer
