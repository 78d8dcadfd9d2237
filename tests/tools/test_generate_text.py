"""Writing in a layout that is not that of the training, up to the tokenizer's ends and the stop strings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_core.config.rules_layout import parallel_problems
from megatron_core.config.rules_stages import stage_problems
from megatron_core.inference import Generator
from megatron_core.parallel import World
from megatron_core.training.checks import RunChecks
from megatron_core.training.loop import save
from tests.runs import tiny_config, tiny_run
from tests.tokenizers.corpus import write_tokenizer_json
from tools.generate_text import Settings, generate_text, run_config


def test_how_layers_were_split_in_training_does_not_matter() -> None:
    trained = tiny_config(
        num_layers=4,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="Et|tt||tL",
        sequence_parallel=True,
    )
    asked = Settings(load="nowhere", prompt="a", pipeline_model_parallel_size=2)
    config = run_config(trained, asked)
    assert config == tiny_config(num_layers=4, pipeline_model_parallel_size=2)
    assert [*stage_problems(config), *parallel_problems(config, 2)] == []


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
    """At an end of a turn that only generation_config.json names, found in the checkpoint after the files are gone."""
    files, saved = tmp_path / "tokenizer files", tmp_path / "saved"
    files.mkdir()
    write_tokenizer_json(files, ("<|endoftext|>", "<turn>"))
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(files), "vocab_size": None}
    run = tiny_run(save=str(saved), **tokenizer)
    save(run, RunChecks(run))
    shutil.rmtree(files)

    def scripted(self: Generator, prompt: list[int], *args: object, ends: frozenset[int]) -> Iterator[int]:
        for token in [*run.tokenizer.tokenize("the hat and"), 1, *run.tokenizer.tokenize(" more")]:
            yield token
            if token in ends:
                return

    monkeypatch.setattr(Generator, "generate", scripted)
    world = World(0, 1, 0, torch.device("cpu"))
    generate_text(Settings(load=str(saved), prompt="cat: ", stop=stop), world)
    assert capsys.readouterr().out == f"cat: {expected}\n"
