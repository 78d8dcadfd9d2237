"""Conversations as tokens: the whole text of the chat template, with the tokens of answers marked."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from megatron_core.errors import DataError
from megatron_core.features.conversations import tool_calls
from megatron_core.features.conversations.chat_template import REASONING, ChatTemplate, Rendered
from megatron_core.features.conversations.message_keys import is_learned, without_flags
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.base import BaseTokenizer, Offsets, end_ids

Message = Mapping[str, Any]
Encoded = tuple[list[int], list[bool]]
"""The tokens of a conversation, and True for those of answers."""
Span = tuple[int, int]
"""Half-open character range of a text."""
THINK = ("<think>", "</think>")
"""Marks around the reasoning in a message's content."""


@dataclass
class Encoding:
    """A conversation as text and as tokens."""

    text: str
    ids: list[int]
    offsets: Offsets
    counted: list[bool]
    learned: list[Message]
    """Messages that count in the loss."""
    has_end: list[bool] = field(default_factory=list)
    """Of each answer whether a token that ends generated texts is learned after it."""
    added_end: int | None = None
    """Token after the last answer that the template does not write."""


@dataclass(frozen=True)
class ConversationTokenizer:
    """Converts messages to tokens and marks the tokens of answers."""

    tokenizer: Tokenizer
    template: ChatTemplate
    last_only: bool = False
    """Whether only the last answer of a conversation counts."""

    def encode(
        self, messages: Sequence[Message], tools: Any = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded:
        """Tokens of the whole conversation as one text, and True for those with a character of an answer.

        An answer is the text that the template marks with ``{% generation %}``. Without marks it is the text that a
        message of the assistant adds after its prompt, up to the end-of-turn token (white space after it is never
        generated). A token that ends generated texts and follows an answer belongs to it, even if the next message's
        heading begins with it. If nothing follows the last answer, such a token of ``generation_config.json`` is added.
        An answer whose message has ``weight`` 0 does not count, as in OpenAI's files; see ``message_keys``.

        Except for the added token, the tokens equal ``apply_chat_template(messages, tokenize=True, **variables)`` in
        transformers, with the arguments of calls as objects.
        """
        encoding = self.encoding(messages, tools, variables)
        return encoding.ids, encoding.counted

    def encoding(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        variables: Mapping[str, Any] | None = None,
        prompt_length: int | None = None,
    ) -> Encoding:
        """As ``encode``, with the text and what is known of it.

        ``prompt_length``: the number of messages before a single answer, which is all later text, also after its
        end-of-turn token, as in trl's DPO.
        """
        all_answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [number for number, message in enumerate(messages) if is_learned(message)]
        counting = [number for number in learned if number in (all_answers[-1:] if self.last_only else all_answers)]
        messages = [without_flags(message) for message in messages]
        if prompt_length is not None:
            beginnings = [(prompt_length, True)]
        elif self.template.marks_answers:
            beginnings = []
        else:
            beginnings = [pair for number in counting for pair in ((number, True), (number + 1, False))]
        rendered = self._render(messages, tools, variables, beginnings)
        text = rendered.text
        ids, offsets = cast(BaseTokenizer, self.tokenizer).tokenize_with_offsets(text)
        if prompt_length is not None:
            answers = [(rendered.beginnings[0][1], len(text))]
        elif self.template.marks_answers:
            answers = self._of_marks(rendered.marks, all_answers, counting)
        else:
            answers = list(self._answers(messages, counting, rendered.beginnings))
        if not any(begin < end for begin, end in answers) and any(messages[n].get("content") for n in counting):
            raise DataError(
                "the chat template writes nothing for an answer, so nothing would be learned; choose another one "
                "with --chat-template"
            )
        encoding = Encoding(text, ids, offsets, [False] * len(ids), [messages[number] for number in counting])
        self._count(encoding, answers, to_end=prompt_length is not None)
        return encoding

    def _render(
        self,
        messages: Sequence[Message],
        tools: Any,
        variables: Mapping[str, Any] | None,
        beginnings: Sequence[tuple[int, bool]],
    ) -> Rendered:
        """Render messages whose calls have arguments as objects, or as JSON texts if the template needs these."""
        objects = tool_calls.decoded(messages)
        texts = tool_calls.encoded(messages)
        refusal = None
        try:
            rendered = self.template.render_answers(objects, tools=tools, variables=variables, beginnings=beginnings)
        except DataError as error:
            if objects == texts:
                raise
            refusal = error
        else:
            # A template for texts writes an object in Python's notation, {'a': 1}.
            arguments = [value for message in objects for value in tool_calls.arguments_of(message) if value]
            if not any(isinstance(value, Mapping) and str(value) in rendered.text for value in arguments):
                return rendered
        try:
            return self.template.render_answers(texts, tools=tools, variables=variables, beginnings=beginnings)
        except DataError as error:
            raise (refusal or error) from None

    def _of_marks(self, spans: list[Span], all_answers: Sequence[int], counting: Sequence[int]) -> list[Span]:
        """The marked characters of the messages ``counting``."""
        if self.last_only:
            return spans[-1:] if counting else []
        if len(counting) == len(all_answers):
            return spans
        if len(spans) != len(all_answers):
            raise DataError(
                f"the chat template marks {len(spans)} texts as answers of {len(all_answers)} messages of the "
                "assistant, so weight=0 cannot be applied; use a template that marks each, or none"
            )
        return [span for span, number in zip(spans, all_answers, strict=True) if number in counting]

    def _answers(
        self, messages: Sequence[Message], counting: Sequence[int], beginnings: Sequence[Span]
    ) -> Iterator[Span]:
        """The characters that the messages ``counting`` add to the text after their prompts."""
        for number, prompt, conversation in zip(counting, beginnings[::2], beginnings[1::2], strict=True):
            prompt_length, prompt_common = prompt
            full_length, full_common = conversation
            if prompt_common < prompt_length or full_common < full_length or full_length < prompt_length:
                raise DataError(
                    "the chat template changes earlier messages when later ones are added, so answers cannot be "
                    "located; choose another one with --chat-template, or one that marks answers "
                    f"with {{% generation %}}{'' if self.last_only else ', or add --sft-loss last_answer'}"
                )
            if prompt_length == full_length and messages[number].get("content"):
                raise DataError(
                    "the chat template writes nothing for an answer, so nothing would be learned; choose another "
                    "one with --chat-template"
                )
            yield prompt_length, full_length

    def _count(self, encoding: Encoding, answers: Sequence[Span], *, to_end: bool) -> None:
        """Mark the tokens of answers and, unless they last to the end of the text, of their ends."""
        text = encoding.text
        ids = encoding.ids
        offsets = encoding.offsets
        counted = encoding.counted
        if not to_end:
            answers = [span for span in answers if span[0] < span[1]]
            self._add_end(encoding, answers)
        for begin, end in answers:
            if not (self.template.marks_answers or to_end):
                end = self._turn_end(ids, offsets, begin + len(text[begin:end].rstrip()), end)
            for number, (first, stop) in enumerate(offsets):
                counted[number] |= first < end and max(stop, first + 1) > begin
            if not to_end:
                last_of_end = self._end_after(encoding, end)
                encoding.has_end.append(last_of_end is not None)
                for number in range(bisect_left(offsets, end, key=_first), (last_of_end or -1) + 1):
                    counted[number] = True

    def _add_end(self, encoding: Encoding, answers: Sequence[Span]) -> None:
        """Add a token after the last answer if no text follows it and it has no end."""
        declared = [end for end in getattr(self.tokenizer, "declared_ends", ()) if end < self.tokenizer.vocab_size]
        if not answers or not declared or encoding.text[answers[-1][1] :].strip():
            return
        if self._end_after(encoding, answers[-1][1]) is not None:
            return
        added = next((end for end in declared if end == self.tokenizer.eos), declared[0])
        encoding.added_end = added
        encoding.ids.append(added)
        encoding.offsets.append((len(encoding.text), len(encoding.text) + 1))
        encoding.counted.append(False)

    def _end_after(self, encoding: Encoding, end: int) -> int | None:
        """The number of the token that ends the text up to the character ``end``: its last token with a visible
        character, or the first such token after it; None if that does not end generated texts."""
        text = encoding.text
        ids = encoding.ids
        offsets = encoding.offsets
        visible = len(text[:end].rstrip())
        final = bisect_left(offsets, visible, key=_first) - 1
        for number in range(max(final, 0), len(ids)):
            if ids[number] in self._text_ends:
                return number
            first, after = offsets[number]
            if number > final and text[first:after].strip():
                return None
        return None

    def _turn_end(self, ids: Sequence[int], offsets: Offsets, visible: int, end: int) -> int:
        """End of an answer up to ``end``: after its last ``visible`` character if an end-of-turn token is there."""
        final = bisect_left(offsets, visible, key=_first) - 1
        return visible if final >= 0 and ids[final] in self._turn_ends else end

    @cached_property
    def _text_ends(self) -> frozenset[int]:
        """Tokens that end generated texts."""
        return end_ids(self.tokenizer)

    @cached_property
    def _turn_ends(self) -> frozenset[int]:
        """Tokens that may end a turn: end-of-text tokens and added tokens outside the model's vocabulary."""
        return self._text_ends | getattr(self.tokenizer, "added_ids", frozenset)()


def _first(offsets: Span) -> int:
    return offsets[0]


def losses_of(encoding: Encoding, tools: Any) -> Counter[str]:
    """The parts of learned messages, and those that the template leaves out or rewrites, as ``lost NAME``."""
    counts: Counter[str] = Counter()
    for message in encoding.learned:
        content = message.get("content") or ""
        inner, mark, visible = content.partition(THINK[1])
        reasoning = next((message[name] for name in REASONING if isinstance(message.get(name), str)), "")
        pieces = {
            "reasoning": [reasoning, inner.removeprefix(THINK[0])] if mark else [reasoning],
            "text": [visible if mark else content],
            "calls": list(tool_calls.names_of(message)),
        }
        for name, texts in pieces.items():
            texts = [text.strip() for text in texts if text.strip()]
            counts[name] += bool(texts)
            counts[f"lost {name}"] += not all(text in encoding.text for text in texts)
    names = [tool.get("function", tool).get("name") for tool in tools or ()]
    counts["tools"] += bool(names)
    counts["lost tools"] += not all(isinstance(name, str) and name in encoding.text for name in names)
    counts["answers"] += len(encoding.has_end)
    counts["no end"] += encoding.has_end.count(False)
    counts["added end"] += encoding.added_end is not None
    return counts
