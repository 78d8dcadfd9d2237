"""Generation in a layout other than that of the training, up to the tokenizer's end tokens and the stop strings."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import processors

from megatron_core.checkpoint import find_checkpoint
from megatron_core.commands.generate_text import GenerateFlags, generate_text, read_prompts
from megatron_core.config import RunConfig
from megatron_core.config.rules_parallel import parallel_problems
from megatron_core.errors import MegatronError
from megatron_core.features.stage_layouts.settings import stage_problems
from megatron_core.inference import Generator
from megatron_core.inference.generator import GenerationLayout
from megatron_core.parallel import World
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.tokenizers import Tokenizer, tokenizer_of
from megatron_core.training.compatibility import stored_config
from megatron_core.training.setup import set_up
from tests.checkpoint.runs import save_run
from tests.hub.hf_models import LLAMA, transformers
from tests.runs import tiny_config, tiny_run
from tests.vocabularies.corpus import train_bpe, write_tokenizer_json

WORLD_OF_ONE = World(0, 1, 0, torch.device("cpu"))


def test_how_layers_were_split_in_training_does_not_matter() -> None:
    trained = tiny_config(
        num_layers=4,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="Et|tt||tL",
        sequence_parallel=True,
    )
    config = GenerationLayout(pipeline_model_parallel_size=2).applied(trained)
    assert config == tiny_config(num_layers=4, pipeline_model_parallel_size=2)
    assert [*stage_problems(config), *parallel_problems(config, 2)] == []


def saved_model(folder: Path, **settings: object) -> Path:
    """A checkpoint whose original tokenizer files no longer exist."""
    files, saved = folder / "tokenizer files", folder / "saved"
    files.mkdir()
    write_tokenizer_json(files, ("<|endoftext|>", "<turn>"))
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(files), "vocab_size": None}
    run = tiny_run(save=str(saved), init_method_std=0.4, **tokenizer, **settings)
    save_run(run)
    shutil.rmtree(files)
    return saved


def scripted(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """Every prompt is continued in this way."""
    tokens = [*tokenizer.tokenize("the hat and"), 1, *tokenizer.tokenize(" more")]

    def run(self: Generator, ids: list[int], *_: object) -> tuple[torch.Tensor, list]:
        written = 0 if len(ids) > 1 else tokens.index(ids[0]) + 1
        logits = torch.zeros(1, self.vocab_size)
        logits[0, tokens[written]] = 9.0
        return logits, []

    monkeypatch.setattr(Generator, "run", run)


@pytest.mark.parametrize(
    ("stop", "expected"), [((), "the hat and"), (("t a",), "the ha"), (("never", "and!"), "the hat and")]
)
def test_where_the_text_ends(
    stop: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At an end of a turn defined only in generation_config.json, found in the checkpoint after the original files are
    deleted."""
    saved = saved_model(tmp_path)
    scripted(monkeypatch, tokenizer_of(stored_config(find_checkpoint(str(saved))).data))
    generate_text(GenerateFlags(load=str(saved), prompt=("cat: ",), stop=stop), WORLD_OF_ONE)
    assert capsys.readouterr().out == f"cat: {expected}\n"


def test_a_file_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of different lengths generated together equal those generated separately."""
    saved = saved_model(tmp_path)
    prompts = ["the cat", "def f(", "a hat and a cat and"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    several = GenerateFlags(
        load=str(saved), prompt_file=str(tmp_path / "p.jsonl"), output=str(tmp_path / "o.jsonl"), max_new_tokens=5,
        logprobs=2, max_batch_size=2,
    )  # fmt: skip
    generate_text(several, WORLD_OF_ONE)
    printed = capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [each["prompt"] for each in found] == prompts
    for each in found:
        generate_text(GenerateFlags(load=str(saved), prompt=(each["prompt"],), max_new_tokens=5), WORLD_OF_ONE)
        assert capsys.readouterr().out == f"{each['prompt']}{each['text']}\n"
        assert f"{each['prompt']}{each['text']}\n" in printed
        assert len(each["logprobs"]) == len(each["tokens"]) and each["finish_reason"] in ("stop", "length")
        likely = [pairs[0] for pairs in each["alternatives"]]
        assert likely == [list(pair) for pair in zip(each["tokens"], each["logprobs"], strict=True)], "greedy"
    assert f"{found[0]['logprobs'][0]:.4f}" in printed


@pytest.mark.parametrize("invariant", [True, False])
def test_log_probabilities_of_training(invariant: bool, tmp_path: Path) -> None:
    """With --layout-invariant they are those of the model in training, to the bit; without, to rounding errors."""
    saved, output = saved_model(tmp_path), tmp_path / "o.jsonl"
    settings = GenerateFlags(
        load=str(saved), prompt=("the cat", "a hat"), output=str(output), max_new_tokens=5, logprobs=0,
        layout_invariant=invariant,
    )  # fmt: skip
    generate_text(settings, WORLD_OF_ONE)
    trained = stored_config(find_checkpoint(str(saved)))
    changed = {"load": str(saved), "save": None, "layout_invariant": True}
    run = set_up(RunConfig.from_flat(trained.flat() | changed), WORLD_OF_ONE)
    tokenizer, equal = tokenizer_of(run.config.data), []
    assert tokenizer is not None
    for each in map(json.loads, output.read_text().splitlines()):
        tokens = tokenizer.tokenize(each["prompt"]) + each["tokens"]
        row = torch.tensor([tokens + [0] * (16 - len(tokens))])
        with torch.no_grad():
            losses = run.stages[0].eval()(
                row, labels=row.roll(-1, 1), sequences=SequenceDetails(sample_index=torch.zeros(1, dtype=torch.int64))
            )
        expected = (-losses[0, len(tokens) - len(each["tokens"]) - 1 : len(tokens) - 1]).tolist()
        assert each["logprobs"] == pytest.approx(expected, abs=1e-5)
        equal.append(each["logprobs"] == expected)
    assert all(equal) if invariant else not any(equal)


def test_models_that_cannot_have_the_bits_of_training_are_refused(tmp_path: Path) -> None:
    saved = saved_model(tmp_path, fp8_format="e4m3")
    with pytest.raises(MegatronError, match="fp8_format=e4m3 cannot be used with layout_invariant=True"):
        generate_text(GenerateFlags(load=str(saved), prompt=("a",), layout_invariant=True), WORLD_OF_ONE)


def test_prompts_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = saved_model(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\n" + "the hat and " * 9 + "\ndef f(\n"))
    generate_text(GenerateFlags(load=str(saved), interactive=True, max_new_tokens=4), WORLD_OF_ONE)
    first, wrong, last = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("the cat") and last.startswith("def f(")
    assert wrong.startswith("error: 'the hat and") and "leave no room in the 16 positions" in wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no prompt was given; use --prompt, --prompt-file or --interactive"),
        ({"prompt": ("a",), "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompt_file": "nowhere"}, "prompt_file='nowhere' cannot be read"),
        ({"prompt_file": "bad.jsonl"}, r'bad.jsonl:2: this is not an object with a string "prompt"'),
        ({"prompt_file": "half.jsonl"}, r"'\\ud800': the prompt is not valid Unicode"),
        ({"prompt": ("a\udcff",)}, r"'a\\udcff': the prompt is not valid Unicode"),
    ],
)
def test_wrong_settings(settings: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n[1]\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    with pytest.raises(MegatronError, match=message):
        generate_text(GenerateFlags(load="nowhere", **settings), WORLD_OF_ONE)


def test_prompts_are_separated_by_newlines_only(tmp_path: Path) -> None:
    """JSON does not escape other line separators, of which Python knows many."""
    prompts = ["a\u2028b", "c\x85d", "e\x0cf"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "p.jsonl").write_bytes("\r\n".join([*lines, "", ""]).encode("utf-8-sig"))
    (tmp_path / "p.txt").write_bytes("\r\n".join([*prompts, " ", ""]).encode("utf-8-sig"))
    assert read_prompts(str(tmp_path / "p.jsonl")) == read_prompts(str(tmp_path / "p.txt")) == prompts


def test_a_model_of_hugging_face_has_the_first_token_of_its_texts(tmp_path: Path) -> None:
    """Such as a begin of text, as in transformers; its post-processor adds it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA | {"vocab_size": 300, "initializer_range": 0.3, "eos_token_id": 299})
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    library = train_bpe(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    output = tmp_path / "o.jsonl"
    generate_text(
        GenerateFlags(load=str(tmp_path), prompt=("the cat",), max_new_tokens=6, output=str(output)), WORLD_OF_ONE
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = theirs("the cat", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :].tolist()
    assert ids[0, 0] == 0 and json.loads(output.read_text())["tokens"] == expected
