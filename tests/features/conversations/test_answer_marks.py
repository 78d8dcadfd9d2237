"""Answers that a chat template marks."""

import pytest

from megatron_core.errors import DataError
from megatron_core.features.conversations.chat_template import ChatTemplate

TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ last }}"


@pytest.mark.parametrize("last", ["\ufdd0", "\ufdd1"])
def test_a_mark_outside_of_answers_is_refused(last: str) -> None:
    with pytest.raises(DataError, match="U\\+FDD0"):
        ChatTemplate(TEMPLATE, {"last": last}).render_answers([{"content": "a"}])
