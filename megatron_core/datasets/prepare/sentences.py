"""Splitting a document into sentences, for `--split-sentences`."""

from importlib.util import find_spec

from megatron_core.datasets.prepare.encode import Splitter
from megatron_core.errors import ConfigError


def sentence_splitter(keep_newlines: bool) -> Splitter:
    """A function from a text to its sentences, by Punkt's rules without trained abbreviations (Kiss and Strunk, 2006).

    keep_newlines: the white space behind a sentence stays with it; otherwise it is left out.
    ConfigError: the optional package nltk is not installed.
    """
    if find_spec("nltk") is None:
        raise ConfigError("--split-sentences needs the package nltk, which is not installed; pip install nltk")
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    punkt = PunktSentenceTokenizer()
    if not keep_newlines:
        return punkt.tokenize

    def with_spaces(text: str) -> list[str]:
        starts = [start for start, _ in punkt.span_tokenize(text)]
        if not starts:
            return [text] if text else []
        begins = [0, *starts[1:]]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    return with_spaces
