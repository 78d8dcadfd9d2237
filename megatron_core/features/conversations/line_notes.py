"""Notes at the start of a run about conversations: lengths, parts that are not learned, keys without effect."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_core.errors import DataError, shortened
from megatron_core.features.conversations.chat_template import REASONING
from megatron_core.features.conversations.encoder import Encoded, Encoding, losses_of
from megatron_core.features.conversations.message_keys import DETAILS, FLAGS
from megatron_core.features.conversations.schemas import CONTEXTS, LISTS, Line, is_sharegpt
from megatron_core.tokenizers import Tokenizer

CHECKED = 64
"""Lines that are converted to tokens at the start."""
KEYS_CHECKED = 4096
"""Lines whose keys are read at the start."""
MOST_KEYS = 12
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
KNOWN = ("role", "content", "tool_calls", "function_call", *REASONING, *FLAGS, *DETAILS)
"""Keys of a message that are used, or refused."""


def evenly_spaced(lines: Sequence[int], most: int) -> Sequence[int]:
    """Up to ``most`` lines, evenly spaced."""
    return lines[:: -(-len(lines) // most)]


def of_lengths(lines: Sequence[Encoded], sequence_length: int) -> Iterator[str]:
    """How many lines are cut; DataError if no answer remains."""
    room = sequence_length + 1
    longest = max(len(ids) for ids, _ in lines)
    cut = sum(len(ids) > room for ids, _ in lines)
    answers = sum(any(counted) for _, counted in lines)
    left = sum(any(counted[:room]) for _, counted in lines)
    if not left:
        raise DataError(
            f"seq_length={sequence_length} cuts all {len(lines)} lines that were checked before their "
            f"answers; the longest has {longest} tokens: give a larger --seq-length"
        )
    if cut:
        lost = f", {answers - left} of them before their answers" if answers > left else ""
        yield (
            f"seq_length={sequence_length} cuts {cut} of {len(lines)} lines that were checked{lost}; the longest "
            f"has {longest} tokens: give a larger --seq-length to learn the whole answers"
        )


def of_losses(lines: Sequence[tuple[Sequence[Encoding], Any]], tokenizer: Tokenizer) -> Iterator[str]:
    """Parts of answers that the template leaves out or rewrites, and answers without an end."""
    totals: Counter[str] = Counter()
    for encodings, tools in lines:
        for encoding in encodings:
            totals += losses_of(encoding, tools)
    checked = f"in {len(lines)} lines that were checked"
    descriptions = {
        "reasoning": "the reasoning (reasoning_content, <think>)",
        "text": "the text",
        "calls": "the calls of functions",
    }
    for name, what in descriptions.items():
        if lost := totals[f"lost {name}"]:
            yield (
                f"the chat template leaves out or rewrites {what} of {lost} of {totals[name]} answers {checked}, so it "
                "is not learned; another template is given with --chat-template"
            )
    if lost := totals["lost tools"]:
        yield f"the chat template leaves out the tools of {lost} of {totals['tools']} conversations {checked}"
    if totals["added end"]:
        ends = {encoding.added_end for encodings, _ in lines for encoding in encodings} - {None}
        names = ", ".join(repr(tokenizer.detokenize([end])) for end in ends if end is not None)
        yield f"the chat template writes no end after last answers, so {names} of generation_config.json is added"
    if totals["no end"]:
        yield (
            f"{totals['no end']} of {totals['answers']} answers {checked} have no end: no token that ends generated "
            "texts follows them, so a chat with the model will not stop; write {{ eos_token }} after the answer in the "
            "template (--chat-template), or the token that does as eos_token_id in generation_config.json"
        )


def of_keys(lines: Iterable[Line], names: frozenset[str]) -> Iterator[str]:
    """Keys and roles without effect, with the number of lines that have them, and choices that other projects make
    differently. ``names`` are those in the chat template."""
    keys: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    choices: Counter[str] = Counter()
    number = 0
    for line in lines:
        number += 1
        keys.update(line.unused)
        keys.update({f"{key} of messages" for key in _message_keys(line.content, names)})
        roles.update({message["role"] for talk in line.conversations for message in talk} - {*ROLES, *names})
        choices.update(_choices(line))
    if keys:
        listed = [f"{shortened(key, 40)} ({count})" for key, count in keys.most_common(MOST_KEYS)]
        more = f" and {len(keys) - MOST_KEYS} others" if len(keys) > MOST_KEYS else ""
        yield f"keys without effect, with the number of lines of {number} that were read: {', '.join(listed)}{more}"
    if roles:
        listed = [f"{shortened(repr(role), 40)} ({count})" for role, count in roles.most_common(MOST_KEYS)]
        yield f"messages of these roles are not learned (lines of {number} that were read): {', '.join(listed)}"
    yield from (f"{choice} ({count} of {number} lines that were read)" for choice, count in sorted(choices.items()))


def _message_keys(content: Mapping[str, Any], names: frozenset[str]) -> set[str]:
    """The keys of messages that neither this package nor the template reads."""
    unread: set[str] = set()
    for name in (*LISTS.values(), "prompt", "completion", "chosen", "rejected"):
        messages = content.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping):
                keys = {key for key, value in message.items() if value not in (None, "", [], {})}
                unread |= keys - {"from", "value", *FLAGS} if is_sharegpt(message) else keys - {*KNOWN, *names}
    return unread


def _choices(line: Line) -> Iterator[str]:
    """Choices in which other projects differ."""
    keys = line.content.keys() - line.unused
    if keys.isdisjoint(LISTS.values()) and any(line.content.get(name) for name in CONTEXTS if name in keys):
        yield "the question and its context are joined by an empty line (LLaMA-Factory, ms-swift: one line break)"
    prompt = line.content.get("prompt")
    completion = line.content.get("completion")
    if {"prompt", "completion"} <= keys and isinstance(prompt, str) and isinstance(completion, str):
        yield "prompt and completion are texts of a chat with the template (trl: without it)"
    if isinstance(completion, list) and "completion" in keys:
        roles = {message.get("role") for message in completion}
        if roles != {"assistant"}:
            yield "only the assistant's messages of a completion are learned (trl: all)"
