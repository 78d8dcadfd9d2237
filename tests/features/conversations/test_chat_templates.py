"""Chat templates: values as in transformers, and one error sentence for those that fail or never end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from megatron_core.errors import ConfigError, DataError
from megatron_core.features.conversations import chat_template as chat
from megatron_core.features.conversations import template_process
from megatron_core.features.conversations.chat_template import ChatTemplate, chat_template_of
from megatron_core.tokenizers import Tokenizer
from megatron_core.vocabularies.hugging_face import GPT2BPETokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from megatron_core.vocabularies.tik_token import TikTokenizer
from tests.vocabularies.corpus import write_gpt2_files, write_rank_json, write_sentence_piece

MESSAGES = [{"role": "user", "content": " the cat "}, {"role": "assistant", "content": "sat"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"
NESTED = (
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}"
)
TEXTS = (
    "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + [messages[1].content * 5000000] %}"
    "{% endfor %}{{ n.x | length }}"
)
DOUBLED = (
    "{%% set n = namespace(x='xx') %%}{%% for i in range(60) %%}{%% set n.x = n.x %s n.x %%}{%% endfor %%}{{ n.x }}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        (LOOP, "did not end within 0.3 seconds"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than 16777216 characters"),
        ("{{ 'x' * 10**9 }}", "OverflowError"),
        ("{{ 10**9 * [1] }}", "OverflowError"),
        ("{{ 9**(9**9) }}", "OverflowError"),
        (DOUBLED % "~", "OverflowError"),
        (DOUBLED % "+", "OverflowError"),
        ("{{ 'x' | center(10**15) }}", "MemoryError"),
        ("{{ ('\t' * 16000000).expandtabs(1000) | length }}", "MemoryError"),
        ("{{ ('x\n' * 30000) | indent(100000) | length }}", "MemoryError"),
        (TEXTS, "MemoryError"),
        ("{{ messages | length // 0 }}", "ZeroDivisionError"),
        ("{{ messages[5].content }}", "refuses these messages: list object has no element 5"),
    ],
)
def test_what_overflows_is_one_sentence(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        ChatTemplate(template, {}).render(MESSAGES, seconds=0.3 if template == LOOP else 30.0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("template", [LOOP, NESTED, "{{ messages | list | slice(10**9) | list | length }}"])
def test_one_call_cannot_outlive_the_limit(template: str) -> None:
    """A call in C runs no line of Python; the next template is not affected."""
    compiled = ChatTemplate(template, {})
    start = time.monotonic()
    with pytest.raises(DataError, match=r"did not end within 0\.2 seconds"):
        compiled.render(MESSAGES, seconds=0.2)
    assert time.monotonic() - start < 3.0
    assert ChatTemplate("{{ messages[1].content }}", {}).render(MESSAGES) == "sat"


def test_constants_are_folded_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja computes constants while it compiles a template."""
    monkeypatch.setattr(chat, "COMPILE_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"cannot be read within 0\.2 s"):
        ChatTemplate("{{ [1] | slice(1000000000) | list | length }}", {})


def test_a_process_that_dies_is_replaced() -> None:
    """Between requests and during one; a template that ends two processes is an error."""
    template = ChatTemplate("{{ messages[1].content }}", {})
    for _ in range(2):
        os.kill(_process(), signal.SIGKILL)
        assert template.render(MESSAGES) == "sat"
    endless = ChatTemplate(LOOP, {})
    killers = [threading.Timer(0.3 * number, lambda: os.kill(_process(), signal.SIGKILL)) for number in (1, 3)]
    for killer in killers:
        killer.start()
    with pytest.raises(DataError, match="ended twice, with status -9"):
        endless.render(MESSAGES, seconds=20.0)
    for killer in killers:
        killer.join()
    assert template.render(MESSAGES) == "sat"


def test_threads_and_forked_processes() -> None:
    """Threads share the process of their parent; a forked process starts another one."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    numbers = [str(number) for number in range(64)]
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda number: template.render([{"content": number}]), numbers))
    assert texts == numbers
    before = _process()
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        forked = set(pool.starmap(_rendered, [(template, number) for number in numbers]))
    assert {text for text, _ in forked} == set(numbers)
    assert before not in {process for _, process in forked}
    assert template.render(MESSAGES) == " the cat " and _process() == before


def _process() -> int:
    """The id of the process that renders templates."""
    running = template_process.PROCESS._running
    assert running is not None
    return running[0].pid


def _rendered(template: ChatTemplate, text: str) -> tuple[str, int]:
    return template.render([{"content": text}]), _process()


def test_values_that_json_has_not_are_those_of_transformers() -> None:
    """Objects of the caller do not reach the template."""
    messages = [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "\ud800"}]}]
    template = "{{ messages[0].content[0].image }}{{ messages[0].content[1].text | length }}{{ messages | length }}"
    expected = transformers.utils.chat_template_utils.render_jinja_template([messages], chat_template=template)[0][0]
    assert ChatTemplate(template, {}).render(messages) == expected == "<object>11"


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 +", "{{ (" + "(" * 5000 + "1" + ")" * 5001 + " }}"])
def test_a_template_that_cannot_be_read(template: str) -> None:
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        ChatTemplate(template, {})


def test_bounded_operators_are_those_of_jinja(tmp_path: object) -> None:
    """Texts and numbers within the limits equal those of transformers."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ loop.index }}{{ m.content | trim + '!' }}"
        "{{ '-' * 3 }}{{ 2 ** 5 + loop.index0 * 2 }}{{ [1] + [2] }}{{ missing ~ none }}\n{% endfor %}"
    )
    expected = transformers.utils.chat_template_utils.render_jinja_template([MESSAGES], chat_template=template,
                                                                           bos_token="<s>")[0][0]  # fmt: skip
    assert ChatTemplate(template, {"bos_token": "<s>"}).render(MESSAGES, seconds=5.0) == expected


@pytest.mark.parametrize(
    "options",
    ["", "true", "false, 2", "ensure_ascii=true", "indent=4", "separators=(',', ':')", "sort_keys=true, indent=1"],
)
def test_options_of_json_are_those_of_transformers(options: str) -> None:
    template = f"{{{{ {{'b': [1, '<\u00e9>'], 'a': none}} | tojson({options}) }}}}"
    expected = transformers.utils.chat_template_utils.render_jinja_template([MESSAGES], chat_template=template)[0][0]
    assert ChatTemplate(template, {}).render(MESSAGES) == expected


def _tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """Tokenizers that encode special tokens in a text as ordinary text, by one of these tokens."""
    return {
        "<s>": SentencePieceTokenizer(write_sentence_piece(folder), add_bos=True),
        "</s>": TikTokenizer(write_rank_json(folder)),
        "<|endoftext|>": GPT2BPETokenizer(*write_gpt2_files(folder)),
    }


@pytest.mark.parametrize("special", ["<s>", "</s>", "<|endoftext|>"])
@pytest.mark.parametrize("named", [True, False])
def test_special_tokens_that_would_become_text_are_refused(special: str, named: bool, tmp_path: Path) -> None:
    """An end of turn as ordinary text would be learned, but never generated as a token; in a message it is text."""
    tokenizer = _tokenizers(tmp_path)[special]
    assert len(tokenizer.tokenize(special)) > 2
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.content }}" + ("{{ end_token }}" if named else special) + "{% endfor %}"
    )
    folder = {path.parent for path in tokenizer.files()}.pop()
    (folder / "tokenizer_config.json").write_text(json.dumps({"end_token": special}))
    template = chat_template_of(tokenizer, str(file))
    assert template is not None
    with pytest.raises(DataError, match=f"writes {special.replace('|', '.')}, which this kind of tokenizer encodes as"):
        template.render([{"role": "user", "content": special}])
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    template = chat_template_of(tokenizer, str(file))
    assert template is not None and template.render([{"role": "user", "content": special}]) == special
