"""Fine-tuning on conversations: loss masks, document boundaries, and a run from a file of messages."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_core.commands.train_tokenizer import TokenizerFlags as TokenizerSettings
from megatron_core.commands.train_tokenizer import train_and_write
from megatron_core.config import DataConfig, RunConfig
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.conversations.chat_template import ChatTemplate
from megatron_core.features.conversations.dataset import ConversationFile
from megatron_core.features.conversations.encoder import ConversationTokenizer
from megatron_core.features.conversations.packing import first_fit
from megatron_core.features.conversations.schemas import messages_of
from megatron_core.features.conversations.settings import ConversationConfig
from megatron_core.tokenizers import end_ids, tokenizer_of
from megatron_core.training.step import evaluate, train_step
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.datasets.files import splits_of
from tests.runs import TINY, tiny_run
from tests.vocabularies.corpus import write_tokenizer_json

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATE = EACH + "{% if add_generation_prompt %}<assistant>{% endif %}"
BYTES = {"tokenizer_type": "ByteLevelTokenizer"}
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "xyz"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "w"},
]
SHORT = [{"role": "system", "content": ""}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]


def _write(folder: Path, *lines: list[dict]) -> dict:
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return BYTES | {"sft": True, "chat_template": str(folder / "chat.jinja")}


def _dataset(folder: Path, *lines: list[dict], length: int):
    settings = _write(folder, *lines)
    return splits_of(**settings, train_data_path=(str(folder / "talks.jsonl"),), seq_length=length).train


def _text(ids: np.ndarray) -> str:
    return tokenizer_of(DataConfig(**BYTES)).detokenize(ids.tolist())


def test_answers_alone_count() -> None:
    encoder = ConversationTokenizer(tokenizer_of(DataConfig(**BYTES)), ChatTemplate(TEMPLATE, {}))
    tokens, answers = encoder.encode(TALK)
    assert _text(np.array(tokens)) == "<system>S</><user>ab</><assistant>xyz</><user>c</><assistant>w</>"
    assert _text(np.array(tokens)[np.array(answers)]) == "xyz</>w</>"


def test_labels_follow_and_conversations_are_documents(tmp_path: Path) -> None:
    """A system message starts another conversation; the rest of the sequence is padding of the last document."""
    sample = _dataset(tmp_path, TALK + SHORT, length=120)[0]
    whole = "<system>S</><user>ab</><assistant>xyz</><user>c</><assistant>w</>"
    second = "<system></><user>q</><assistant>r</>"
    assert _text(sample["tokens"][: len(whole + second)]) == whole + second
    assert _text(sample["labels"][sample["loss_mask"] == 1]) == "xyz</>w</>r</>"
    assert (sample["labels"][:-1] == sample["tokens"][1:]).all()
    assert sample["document_lengths"].tolist() == [len(whole), len(second), 120 - len(whole + second)]
    starts = [0, len(whole), len(whole + second)]
    assert sample["position_ids"][starts].tolist() == [0, 0, 0] and sample["position_ids"][len(whole) - 1] > 0


@pytest.mark.parametrize("length", [36, 40, 65, 66])
def test_long_conversations_are_cut(tmp_path: Path, length: int) -> None:
    sample = _dataset(tmp_path, TALK + SHORT, length=length)[0]
    assert {len(sample[key]) for key in ("tokens", "labels", "loss_mask", "position_ids")} == {length}
    assert sample["document_lengths"].sum() == length and sample["document_lengths"].min() > 0


def test_lengths_are_checked_at_the_start(tmp_path: Path) -> None:
    """Otherwise a run without a token to learn would report a loss of zero."""

    def notes(*lines: list[dict], length: int) -> tuple[str, ...]:
        settings = _write(tmp_path, *lines) | {"train_data_path": (str(tmp_path / "talks.jsonl"),)}
        found = splits_of(**settings, seq_length=length).notes
        return tuple(note for note in found if "have no end" not in note and "roles are not learned" not in note)

    asked = [*TALK[:2], {"role": "aux", "content": "x"}]
    long = [{"role": "user", "content": "a" * 50}, *TALK[-1:]]
    with pytest.raises(DataError, match=r"seq_length=33 cuts all 1 lines .* before their answers; .* 65 tokens"):
        notes(TALK, length=33)
    with pytest.raises(DataError, match=r"line 1, and 1 other lines .* no message has the role assistant"):
        notes(asked, asked, length=99)
    (size, note) = notes(TALK, asked, SHORT, length=34)
    assert size == "the training data has 3 samples: --train-samples 3 reads each once"
    assert note.startswith("seq_length=34 cuts 2 of 3 lines that were checked; the longest has 65 tokens")
    (_, note) = notes(long, *[SHORT] * 99, length=40)
    assert "cuts 1 of 50 lines that were checked, 1 of them before their answers" in note
    assert notes(TALK, asked, SHORT, length=64) == (size,)


MARKED = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</>{% endgeneration %}{% else %}{{ m.content }}</>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_and_marks_of_answers(tmp_path: Path) -> None:
    """The template receives the line's tools, and may have the marks that transformers uses for masks."""
    settings = _write(tmp_path)
    (tmp_path / "chat.jinja").write_text(MARKED)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
    line = {"messages": talk, "tools": [{"f": 1}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(line))
    sample = splits_of(**settings, train_data_path=(str(tmp_path / "talks.jsonl"),), seq_length=60).train[0]
    assert _text(sample["tokens"]).startswith('[{"f": 1}]<user>ab</><assistant>x</>')
    assert _text(sample["labels"][sample["loss_mask"] == 1]) == "x</>"


BROKEN = {
    '{"messages": [{"role": "user"}]}': "content must be a string, not null or missing",
    '{"messages": [{"content": "x"}]}': "role must be a string",
    '{"messages": "x"}': "messages must be a list of objects",
    '{"conversations": [{"value": "x"}]}': "from must be a string",
    '{"foo": 1}': "cannot infer the schema",
    "1": "is a int, expected an object",
    "{x": "cannot be read as JSON",
    '{"messages": [{"role": "user", "content": "a", "content": "b"}]}': "content occurs twice; remove one",
    "": "is empty; --sft and --dpo need JSON Lines",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "half of a surrogate pair",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named(line: str, tmp_path: Path) -> None:
    settings = _write(tmp_path)
    (tmp_path / "talks.jsonl").write_text("\n\n" + line)
    with pytest.raises(DataError, match=rf"talks\.jsonl{', line 3: ' * bool(line)}.*{BROKEN[line]}"):
        splits_of(**settings, train_data_path=(str(tmp_path / "talks.jsonl"),), seq_length=60).train[0]


def test_each_round_has_every_line_once(tmp_path: Path) -> None:
    lines = [[{"role": "user", "content": c}, {"role": "assistant", "content": c}] for c in "abcde"]
    data = _dataset(tmp_path, *lines, length=40)
    rounds = [[_text(data[i]["tokens"][6:7]) for i in range(n * 5, n * 5 + 5)] for n in range(3)]
    assert all(sorted(each) == list("abcde") for each in rounds) and len({tuple(each) for each in rounds}) > 1


def test_a_run_learns_the_answers(tmp_path: Path) -> None:
    settings = _write(tmp_path, *[TALK] * 6, *[SHORT] * 6)
    run = tiny_run(
        **settings,
        mock_data=False,
        vocab_size=None,
        data_path=(str(tmp_path / "talks.jsonl"),),
        split="2,1,1",
        seq_length=72,
        position_embedding_type="rope",
        train_iters=30,
        lr_decay_style="constant",
    )
    losses = [train_step(run).loss for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    assert evaluate(run, run.splits.valid, 1) < losses[0]


def test_faults_say_what_is_missing(tmp_path: Path) -> None:
    settings = _write(tmp_path, [{"role": "user"}])
    with pytest.raises(DataError, match="line 1: content must be a string"):
        _dataset(tmp_path, [{"role": "user"}], length=8)[0]
    with pytest.raises(ConfigError, match="chat template"):
        splits_of(**BYTES, sft=True, data_path=("x",))
    with pytest.raises(DataError, match="cannot be read"):
        splits_of(**settings, data_path=(str(tmp_path / "absent.jsonl"),))
    changing = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(DataError, match="changes earlier messages"):
        ConversationTokenizer(tokenizer_of(DataConfig(**BYTES)), changing).encode(TALK)
    assert RunConfig.from_flat(TINY | {"sft": True}).section(ConversationConfig).sft


def test_a_template_that_leaves_answers_out_is_refused() -> None:
    encoder = ConversationTokenizer(tokenizer_of(DataConfig(**BYTES)), ChatTemplate("nothing of the messages", {}))
    with pytest.raises(DataError, match="writes nothing for an answer"):
        encoder.encode(TALK)


def test_files_that_cannot_be_read_in_any_order_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    settings = _write(tmp_path, SHORT)
    with pytest.raises(DataError, match="pipe is not a regular file"):
        splits_of(**settings, train_data_path=(str(tmp_path / "pipe"),))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWERS = [" leading spaces", "two\n\nlines \n", "the cat  and", "\n\nbreaks first", "世界 🙂", "x <|im_end|> y", ""]


def _of_transformers(folder: Path, template: str) -> tuple[Any, ConversationTokenizer]:
    """A tokenizer of transformers with a chat template, and this package's encoder of the same files."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    path = write_tokenizer_json(folder, special)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template, eos_token="<|im_end|>")
    return theirs, ConversationTokenizer(HuggingFaceTokenizer(path), ChatTemplate(template, {}))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LINES])
def test_tokens_and_answers_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    """Answers are tokenized with their prompts, and marked answers count as in transformers' mask; the line break after
    the end of a turn does not."""
    theirs, encoder = _of_transformers(tmp_path, template)
    for first, second in pairwise(ANSWERS):
        talk = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "the hat"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": " cat\n"},
            {"role": "assistant", "content": second},
        ]
        ids, answers = encoder.encode(talk)
        expected = theirs.apply_chat_template(
            talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=template == CHATML_MARKED
        )
        assert ids == expected["input_ids"]
        if template == CHATML_MARKED:
            assert answers == [bool(each) for each in expected["assistant_masks"]]
        elif template == CHATML:
            marked = ConversationTokenizer(encoder.tokenizer, ChatTemplate(CHATML_MARKED, {})).encode(talk)
            assert (ids, answers) == marked
        else:  # only the line break ends a turn, so it must be learned
            learned = theirs.decode([token for token, is_answer in zip(ids, answers, strict=True) if is_answer])
            assert learned == f"{first}\n{second}\n"


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_answers_with_weight_0_are_not_learned(template: str, tmp_path: Path) -> None:
    """The tokens stay those of transformers; a completion of trl is learned without the answers in its prompt."""
    theirs, encoder = _of_transformers(tmp_path, template)
    turns = [(("user", "the hat"), ("assistant", "cat")), (("user", "two"), ("assistant", "and x"))]
    talk = [{"role": role, "content": content} for pair in turns for role, content in pair]
    expected = theirs.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]

    def learned(messages: list[dict[str, Any]], **settings: bool) -> str:
        ids, answers = replace(encoder, **settings).encode(messages)
        assert ids == expected
        return theirs.decode([token for token, is_answer in zip(ids, answers, strict=True) if is_answer])

    first, second = "cat<|im_end|>", "and x<|im_end|>"
    assert learned(talk) == first + second
    for weight, wanted in ((0, second), (1, first + second)):
        assert learned([*talk[:1], talk[1] | {"weight": weight}, *talk[2:]]) == wanted
    assert learned([*talk[:3], talk[3] | {"weight": 0}]) == first
    assert learned([*talk[:3], talk[3] | {"weight": 0}], last_only=True) == ""
    assert learned(messages_of({"prompt": talk[:3], "completion": talk[3:]})) == second
    turns_of_sharegpt = [{"from": each["role"], "value": each["content"], "weight": None} for each in talk]
    turns_of_sharegpt[1]["weight"] = 0
    assert learned(messages_of({"conversations": turns_of_sharegpt})) == second
    with pytest.raises(DataError, match=r"weight=0.5 must be 0 \(the answer is not learned\) or 1"):
        encoder.encode([*talk[:3], talk[3] | {"weight": 0.5}])


def test_the_date_of_a_template_is_a_setting(tmp_path: Path) -> None:
    """So a run has the same tokens on every day and on all ranks; transformers writes the present time."""
    dated = CHATML.replace("{% for", "Today Date: {{ strftime_now('%d %b %Y') }}\n{% for", 1)
    theirs, encoder = _of_transformers(tmp_path, dated)
    talk = [{"role": "user", "content": "the hat"}, {"role": "assistant", "content": "cat"}]
    assert encoder.encode(talk)[0] == theirs.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    given = _write(tmp_path, talk)
    (tmp_path / "chat.jinja").write_text(dated)
    for date, words in (("2024-07-26", "26 Jul 2024"), ("2026-11-27", "27 Nov 2026")):
        files = {"train_data_path": (str(tmp_path / "talks.jsonl"),)}
        found = splits_of(**given, **files, seq_length=90, chat_template_date=date)
        assert _text(found.train[0]["tokens"]).startswith(f"Today Date: {words}\n")
        assert any(date in note and "--chat-template-date" in note for note in found.notes)


def test_spaces_are_part_of_their_answer(tmp_path: Path) -> None:
    """A tokenizer may exclude spaces from the characters of tokens; the space before an answer is not learned."""
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    path = write_tokenizer_json(tmp_path)
    library = Tokenizer.from_file(str(path))
    digits = pre_tokenizers.Digits(individual_digits=True)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, library.pre_tokenizer])
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.save(str(path))
    tokenizer = HuggingFaceTokenizer(path)
    encoder = ConversationTokenizer(tokenizer, ChatTemplate(template, {}))
    for answer in ("12", "1 "):
        ids, answers = encoder.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
        learned = [token for token, is_answer in zip(ids, answers, strict=True) if is_answer]
        assert tokenizer.detokenize(learned) == f"a{answer}", "both messages are marked"


def test_a_sentence_piece_model_may_have_an_end_of_turn(tmp_path: Path) -> None:
    """Generation ends with it, and the line break after it is not learned, as with a tokenizer.json."""
    settings = TokenizerSettings(
        input=(str(tmp_path / "text.txt"),),
        output=str(tmp_path / "tokenizer.model"),
        vocab_size=280,
        special_tokens=("<|im_start|>", "<|im_end|>"),
    )
    (tmp_path / "text.txt").write_text("the cat and the hat " * 40)
    train_and_write(settings)
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    assert sorted(map(tokenizer.detokenize, ([end] for end in end_ids(tokenizer)))) == ["", "<|im_end|>"]
    for template in (CHATML, CHATML_MARKED):
        encoder = ConversationTokenizer(tokenizer, ChatTemplate(template, {}))
        ids, answers = encoder.encode(TALK)
        learned = [token for token, is_answer in zip(ids, answers, strict=True) if is_answer]
        assert tokenizer.detokenize(learned) == "xyz<|im_end|>w<|im_end|>"


def test_null_is_no_value(tmp_path: Path) -> None:
    """As in transformers: files that were written from tables have null for the keys of other messages."""
    template = (
        "{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    calls = [{"function": {"name": "f"}}]
    talk = [
        {"role": "user", "content": "a", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}))
    (found,) = ConversationFile(str(tmp_path / "talk.jsonl"))[0].conversations
    assert found == [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    assert ChatTemplate(template, {}).render(found) == 'useraassistant[{"function": {"name": "f"}}]'


def test_a_mark_within_a_message_is_refused() -> None:
    encoder = ConversationTokenizer(tokenizer_of(DataConfig(**BYTES)), ChatTemplate(MARKED, {}))
    with pytest.raises(DataError, match=r"U\+FDD0 or U\+FDD1"):
        encoder.encode([{"role": "user", "content": "\ufdd1"}, {"role": "assistant", "content": "x"}])


def test_packs_hold_every_line_once_and_no_padding_where_another_line_fits(tmp_path: Path) -> None:
    lines = [
        [{"role": "user", "content": c * n}, {"role": "assistant", "content": c}] for n, c in enumerate("abcdefgh")
    ]
    settings = _write(tmp_path, *lines) | {"sft_packing": "first_fit"}
    settings |= {"train_data_path": (str(tmp_path / "talks.jsonl"),), "seq_length": 120}
    splits = splits_of(**settings)
    packed = splits.train
    assert f"{len(packed.packs)} samples with 8 lines: --train-samples {len(packed.packs)} " in splits.notes[0]
    again = splits_of(**settings).train
    assert packed.packs == again.packs and sorted(line for pack in packed.packs for line in pack) == list(range(8))
    samples = [packed[i] for i in range(len(packed.packs))]
    answers = "".join(_text(s["labels"][s["loss_mask"] == 1]) for s in samples)
    assert sorted(answers.replace("</>", "")) == list("abcdefgh")
    sizes = [sum(s["document_lengths"][:-1]) for s in samples[:-1]]
    assert len(samples) < 5 and all(120 - size < 60 for size in sizes)
    for sample in samples:
        starts = np.cumsum([0, *sample["document_lengths"][:-1]])
        assert (sample["position_ids"][starts] == 0).all()


def test_last_answer_alone_counts(tmp_path: Path) -> None:
    encoder = ConversationTokenizer(tokenizer_of(DataConfig(**BYTES)), ChatTemplate(TEMPLATE, {}), last_only=True)
    tokens, answers = encoder.encode(TALK)
    assert _text(np.array(tokens)[np.array(answers)]) == "w</>"


def test_last_answers_of_templates_that_shorten_earlier_ones() -> None:
    """Qwen3's template writes its mark of thinking only into the last answer."""
    mark = "{% if loop.last and m.role == 'assistant' %}T{% endif %}{{ m.content }}"
    template = ChatTemplate(TEMPLATE.replace("{{ m.content }}", mark), {})
    tokenizer = tokenizer_of(DataConfig(**BYTES))
    with pytest.raises(DataError, match="or add --sft-loss last_answer"):
        ConversationTokenizer(tokenizer, template).encode(TALK)
    tokens, answers = ConversationTokenizer(tokenizer, template, last_only=True).encode(TALK)
    assert _text(np.array(tokens)) == "<system>S</><user>ab</><assistant>xyz</><user>c</><assistant>Tw</>"
    assert _text(np.array(tokens)[np.array(answers)]) == "Tw</>"


def test_first_fit() -> None:
    assert first_fit([(0, 6), (1, 5), (2, 4), (3, 99), (4, 5)], 10) == [[0, 2], [1, 4], [3]]
