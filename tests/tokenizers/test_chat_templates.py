"""Endless chat templates, or those with too large values, end in one error sentence."""

from __future__ import annotations

import sys

import pytest
import transformers

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": " the cat "}, {"role": "assistant", "content": "sat"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"
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
        ("{{ messages | length // 0 }}", "ZeroDivisionError"),
        ("{{ messages[5].content }}", "refuses these messages: list object has no element 5"),
    ],
)
def test_what_overflows_is_one_sentence(template: str, message: str) -> None:
    before = sys.gettrace()
    with pytest.raises(DataError, match=message) as raised:
        ChatTemplate(template, {}).render(MESSAGES, seconds=0.3 if template == LOOP else 30.0)
    assert "\n" not in str(raised.value) and sys.gettrace() is before


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
