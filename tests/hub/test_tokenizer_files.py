"""Tokenizer files are kept in import, training and export, so that a fine-tuned model can be used for chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_core.checkpoint import find_checkpoint
from megatron_core.config import RunConfig
from megatron_core.features.conversations.chat_template import chat_template_of
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.parallel import World
from megatron_core.tokenizers import tokenizer_of
from megatron_core.training import read_settings
from megatron_core.training.compatibility import open_model, stored_config
from megatron_core.training.setup import set_up
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.hub.hf_models import LLAMA, transformers
from tests.runs import tiny_run
from tests.vocabularies.corpus import write_gpt2_files, write_sentence_piece, write_tokenizer_json

TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
DEFAULT = "{{ bos_token }}" + TURN + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TOOLS = "{{ bos_token }}{% for t in tools %}{{ t | tojson }}{% endfor %}" + TURN
SUMMARY = "Summary of " + TURN
MESSAGES = [{"role": "user", "content": "caf\u00e9 <b> & ''"}, {"role": "assistant", "content": "yes"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}


def in_config(folder: Path, template: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def in_files(folder: Path, **further: str) -> None:
    in_config(folder, "{{ 'not this one' }}")
    (folder / "chat_template.jinja").write_text(DEFAULT)
    for name, template in further.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template)


TEMPLATES: dict[str, tuple[Callable[[Path], None], list[str | None]]] = {
    "text in tokenizer_config.json": (lambda f: in_config(f, DEFAULT), [None]),
    "list in tokenizer_config.json": (
        lambda f: in_config(f, [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}]),
        [None],
    ),
    "file": (in_files, [None]),
    "files": (lambda f: in_files(f, tool_use=TOOLS, summary=SUMMARY), [None, "summary"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of Hugging Face with a tokenizer in two formats."""
    found = tmp_path / "theirs"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA | {"vocab_size": 400})
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    write_tokenizer_json(found, ("<|endoftext|>", "<|user|>", "<|assistant|>"))
    write_gpt2_files(found)
    names = {"bos_token": "<|user|>", "eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (found / "tokenizer_config.json").write_text(json.dumps(names))
    (found / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (found / "added_tokens.json").write_text(json.dumps({"<|user|>": 1}))
    (found / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return found


def train(native: Path, save: Path) -> None:
    """Resume from the checkpoint in ``native``, and save."""
    flags = ["--load", str(native), "--use-checkpoint-args", "--finetune", "--mock-data", "--train-iters", "1"]
    config, _ = read_settings("x", [*flags, "--seq-length", "16", "--save", str(save), "--lr", "0.1"])
    run = set_up(config, World(0, 1, 0, torch.device("cpu")))
    run.state.iteration = 1
    run.saver.save(run.state)


def chat(folder: Path, name: str | None, tools: list[dict] | None) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer.apply_chat_template(
        MESSAGES, chat_template=name, tools=tools, tokenize=False, add_generation_prompt=True
    )


def of_model(files: Path) -> set[str]:
    weights = {"model.safetensors", "config.json"}
    return {str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()} - weights


@pytest.mark.parametrize("kind", TEMPLATES)
def test_conversations_have_the_same_text_after_import_training_and_export(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    write, names = TEMPLATES[kind]
    write(folder)
    import_hugging_face(folder, tmp_path / "native", verify=False)
    train(tmp_path / "native", tmp_path / "trained")
    export_hugging_face(tmp_path / "trained", tmp_path / "again", verify=False)
    assert of_model(tmp_path / "again") == of_model(folder)
    for file in of_model(folder):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
    for name in names:
        for tools in (None, [TOOL]):
            expected = chat(folder, name, tools)
            assert chat(tmp_path / "again", name, tools) == expected
            for place in (folder, tmp_path / "native", tmp_path / "trained") if name is None else ():
                reader, config = open_model(str(place))
                reader.__exit__()
                template = chat_template_of(tokenizer_of(config.data))
                assert template.render(MESSAGES, tools=tools) == expected, place


def test_the_template_of_a_training_with_conversations_is_kept(tmp_path: Path) -> None:
    """Also for a tokenizer without files."""
    own = tmp_path / "own.jinja"
    own.write_text(DEFAULT)
    run = tiny_run(tokenizer_type="ByteLevelTokenizer", vocab_size=300, save=str(tmp_path / "save"))
    changed = {"sft": True, "mock_data": False, "data_path": ("x.jsonl",), "chat_template": str(own)}
    run.saver.config = RunConfig.from_flat(run.config.flat() | changed)
    run.saver.save(run.state)
    own.unlink()
    config = stored_config(find_checkpoint(str(tmp_path / "save")))
    template = chat_template_of(tokenizer_of(config.data), config.data.chat_template)
    assert template.render([{"role": "user", "content": "a"}]) == "<|user|>a<|assistant|>"


def test_files_of_a_tokenizer_that_is_not_used_are_kept(folder: Path, tmp_path: Path) -> None:
    """A folder without a tokenizer.json has no tokenizer here, and has the same files after export."""
    (folder / "tokenizer.json").unlink()
    in_files(folder, tool_use=TOOLS)
    import_hugging_face(folder, tmp_path / "native", verify=False)
    export_hugging_face(tmp_path / "native", tmp_path / "again", verify=False)
    assert of_model(tmp_path / "again") == of_model(folder)


def test_a_sentencepiece_model_keeps_its_template(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    file = write_sentence_piece(tmp_path, keep_spaces=True).rename(tmp_path / "llama" / "tokenizer.model")
    names = {"bos_token": "[B]", "eos_token": "[E]", "tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "llama" / "tokenizer_config.json").write_text(json.dumps(names))
    in_files(tmp_path / "llama")
    llama = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
    tokenizer = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(file), "vocab_size": None}
    run = tiny_run(**tokenizer, **llama, save=str(tmp_path / "ours"))
    run.saver.save(run.state)
    export_hugging_face(tmp_path / "ours", tmp_path / "again", verify=False)
    expected = chat_template_of(SentencePieceTokenizer(file)).render(MESSAGES)
    assert expected == chat(tmp_path / "again", None, None) and expected.startswith("[B]<|user|>caf\u00e9 <b> & ''")
    config = stored_config(find_checkpoint(str(tmp_path / "ours")))
    assert chat_template_of(tokenizer_of(config.data)).render(MESSAGES) == expected
