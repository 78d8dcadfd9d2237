"""Text and tokens of completions in OpenAI's format, for tokenizers that omit the space before a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from megatron_core.features.conversations.chat_template import ChatTemplate
from megatron_core.inference import Progress, TokenScore
from megatron_core.inference.openai import Protocol, RequestLimits, WebJob
from megatron_core.inference.openai_requests import RequestError
from megatron_core.inference.text import TextStream
from megatron_core.tokenizers import ByteLevelTokenizer, Tokenizer
from megatron_core.tokenizers.base import end_ids
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.inference.fuzz import generator_of
from tests.vocabularies.corpus import train_bpe, write_sentence_piece

TEXT = "the cat and the hat"


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind.startswith("SentencePiece"):
        return SentencePieceTokenizer(write_sentence_piece(folder), add_bos=kind.endswith("begin"))
    words = ["the", "cat", "and", "hat"]
    if kind == "Metaspace":
        splitter, decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        words = [f"\u2581{word}" for word in words]
    else:
        splitter, decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    library = LibraryTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer, library.decoder = splitter, decoder
    library.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


def job_of(tokenizer: Tokenizer, *, chat: bool = False, **asked: Any) -> tuple[Protocol, WebJob]:
    template = ChatTemplate("{{ messages[0].content }}", {})
    protocol = Protocol(tokenizer, template, RequestLimits(100), "m", tokenizer.vocab_size)
    return protocol, protocol.job(json.dumps(asked).encode(), chat=chat)


def test_parameters_of_vllm() -> None:
    """Names and defaults of its ``SamplingParams``: programs send all of them."""
    tokenizer = ByteLevelTokenizer()
    defaults = {"min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "min_tokens": 0, "bad_words": []}
    defaults |= {"use_beam_search": False, "skip_special_tokens": True, "spaces_between_special_tokens": True}
    defaults |= {"include_stop_str_in_output": False, "prompt_logprobs": None, "ignore_eos": False, "top_k": -1}
    (choice,) = job_of(tokenizer, prompt="a", stop_token_ids=[], **defaults)[1].choices
    assert choice.request.sampling.top_k == 0 and choice.request.ends == end_ids(tokenizer)
    (choice,) = job_of(tokenizer, prompt="a", stop_token_ids=[7], ignore_eos=True)[1].choices
    assert choice.request.ends == {7}
    (choice,) = job_of(tokenizer, prompt="a", stop_token_ids=[7])[1].choices
    assert choice.request.ends == {7} | end_ids(tokenizer)
    for name, value, fix in (("min_p", 0.1, "give 0"), ("prompt_logprobs", 1, "remove it"), ("top_k", -2, "-1")):
        with pytest.raises(RequestError, match=f"{name}={value}.*{fix}"):
            job_of(tokenizer, prompt="a", **{name: value})


@pytest.mark.parametrize("kind", ["SentencePiece", "SentencePiece with begin", "Metaspace", "WordPiece"])
@pytest.mark.parametrize("given", ["text", "tokens"])
def test_a_completion_continues_its_prompt(kind: str, given: str, tmp_path: Path) -> None:
    """Prompt and completion are the whole text, and the reported tokens are the completion."""
    tokenizer = tokenizer_of(kind, tmp_path)
    ids, old = tokenizer.tokenize(TEXT), len(tokenizer.tokenize("the cat"))
    prompt = "the cat" if given == "text" else ids[:old]
    for echo in (False, True):
        protocol, job = job_of(tokenizer, prompt=prompt, max_tokens=len(ids) - old, logprobs=1, echo=echo)
        (choice,) = job.choices
        scores = tuple(TokenScore(-1.0) for _ in range(old - 1)) if echo else ()
        for number, token in enumerate(ids[old:], old + 1):
            finished = "length" if number == len(ids) else None
            choice.add(Progress(0, token, TokenScore(-1.0, ((token, -1.0),)), finished, scores))
        found = protocol.choice_json(job, choice)
        assert found["text"] == (TEXT if echo else " and the hat")
        assert "".join(found["logprobs"]["tokens"]) == found["text"]
        tokens, offsets = found["logprobs"]["tokens"], found["logprobs"]["text_offset"]
        assert all(found["text"].startswith(token, at) for token, at in zip(tokens, offsets, strict=True))
        assert list(found["logprobs"]["top_logprobs"][-1]) == tokens[-1:]


def test_an_answer_of_a_chat_is_a_text_of_its_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("SentencePiece", tmp_path)
    ids = tokenizer.tokenize(TEXT)
    protocol, job = job_of(tokenizer, chat=True, messages=[{"role": "user", "content": "a"}], logprobs=True)
    (choice,) = job.choices
    for token in ids:
        choice.add(Progress(0, token, TokenScore(-1.0), "length" if token is ids[-1] else None))
    found = protocol.choice_json(job, choice)
    assert found["message"]["content"] == TEXT == "".join(each["token"] for each in found["logprobs"]["content"])


def test_an_echo_is_the_prompt_as_it_was_given(tmp_path: Path) -> None:
    """The text of the tokens may differ: this tokenizer has no token for a word, and none for several spaces."""
    tokenizer = tokenizer_of("WordPiece", tmp_path)
    prompt = "the  dog"
    ids = tokenizer.tokenize(prompt)
    for asked, expected in ((prompt, prompt), (ids, tokenizer.detokenize(ids))):
        (choice,) = job_of(tokenizer, prompt=asked, max_tokens=0, echo=True)[1].choices
        assert choice.echo == expected
    assert tokenizer.detokenize(ids) != prompt


def test_prompts_of_models_of_hugging_face_begin_as_in_transformers(tmp_path: Path) -> None:
    """With the tokens that the file puts before a text, unless the prompt has them; given tokens do not change."""
    library = train_bpe(["<s>", "</s>"])
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    library.post_processor = template
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    generator = replace(generator_of({}), ids_before_prompt=tokenizer.ids_before_prompt)
    protocol = Protocol(tokenizer, None, RequestLimits(100), "m", tokenizer.vocab_size, generator.before_prompt)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    *expected, _ = theirs("the cat").input_ids
    plain = tokenizer.tokenize("the cat")
    assert expected == [0, *plain]
    for prompt, given in (("the cat", expected), (plain, plain), ("<s>the cat", expected)):
        (choice,) = protocol.job(json.dumps({"prompt": prompt, "max_tokens": 1}).encode(), chat=False).choices
        assert choice.request.prompt == tuple(given)


class BytePairs(ByteLevelTokenizer):
    """Tokens of several bytes, some of which end within a character."""

    tokens = (
        b"a",
        b"b",
        b"ab",
        b"\xe4",
        b"\xb8",
        b"a\xe4",
        b"\xb8\x96b",
        b"\x99\x82",
        b"ST",
        b"OP",
        b"OP\xe4",
        b"\xff",
    )

    def tokenize(self, text: str) -> list[int]:
        return [0]

    def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", "replace")


def test_no_text_has_a_stop_string() -> None:
    """Also if the last token completes it and begins a character; without one, the text is that of all tokens."""
    random, tokenizer = Random(0), BytePairs()
    for _ in range(3000):
        ids = [random.randrange(len(tokenizer.tokens)) for _ in range(random.randrange(1, 30))]
        stops = random.choice([["STOP"], ["ab"], ["b", "\u4e16"], ["aa"]])
        stream, text = TextStream(tokenizer, stops), ""
        for token in ids:
            text += "" if stream.stopped else stream.add(token)
        text += stream.finish()
        whole = tokenizer.detokenize(ids)
        assert text == whole[: min([whole.index(stop) for stop in stops if stop in whole], default=None)]
        assert stream.stopped == any(stop in whole for stop in stops)


def test_a_stop_string_in_the_last_token_is_the_reason() -> None:
    tokenizer = BytePairs()
    protocol, job = job_of(tokenizer, prompt=[0], max_tokens=2, stop="STOP")
    (choice,) = job.choices
    ids = [tokenizer.tokens.index(each) for each in (b"ST", b"OP\xe4")]
    assert choice.add(Progress(0, ids[0])) + choice.add(Progress(0, ids[1], finished="length")) == ""
    assert protocol.choice_json(job, choice)["finish_reason"] == "stop"
