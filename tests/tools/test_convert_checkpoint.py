"""The converter called like users call it, and text from a folder of Hugging Face."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_core import parallel_state
from megatron_core.commands.convert_checkpoint import ConvertFlags, convert_checkpoint, main
from megatron_core.errors import ConfigError
from megatron_core.inference import Engine, Generator, Request
from megatron_core.inference.generator import GenerationLayout
from megatron_core.locations import CACHE_VARIABLE
from megatron_core.training.compatibility import open_model
from megatron_core.verify.ranks import run_ranks, this_world
from tests.hub.hf_models import save_model, transformers
from tests.programs import run_program

run_tool = partial(run_program, "tools/convert_checkpoint.py")


def test_there_and_back_on_the_command_line(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    done = run_tool("--from", "hf", "--to", "native", "--load", str(tmp_path / "hf"), "--save", str(tmp_path / "own"))
    assert done.returncode == 0, done.stderr
    assert "(native); logits differ by" in done.stdout
    settings = {"to": "hf", "load": str(tmp_path / "own"), "save": str(tmp_path / "again"), "verify": False}
    assert convert_checkpoint(ConvertFlags(source="native", **settings)).endswith("(hf); not verified")
    again = run_tool("--from", "hf", "--to", "native", "--load", settings["save"], "--save", str(tmp_path / "own"))
    assert again.returncode == 1
    assert again.stderr.startswith("convert_checkpoint: ") and again.stderr.count("\n") == 1
    assert "holds a checkpoint" in again.stderr
    with pytest.raises(ConfigError, match="nothing to convert"):
        convert_checkpoint(ConvertFlags(source="hf", **settings))


def test_flags_without_effect_are_refused(tmp_path: Path) -> None:
    for source, to, flag in (
        ("hf", "native", {"ckpt_step": 5}),
        ("hf", "native", {"optimizer": False}),
        ("megatron", "native", {"model_type": "llama"}),
        ("native", "peft", {"dtype": "bfloat16"}),
        ("native", "megatron", {"dtype": "bfloat16"}),
        ("megatron", "hf", {"average": True}),
        ("deepspeed", "native", {"hf_config": "config.json"}),
    ):
        name = "--" + next(iter(flag)).replace("_", "-")
        settings = {"source": source, "to": to, "load": str(tmp_path / "a"), "save": str(tmp_path / "b")}
        with pytest.raises(ConfigError, match=f"{name} has no effect with --from {source} --to {to}, only with"):
            convert_checkpoint(ConvertFlags(**settings, **flag))


def test_there_and_back_through_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    save_model("llama", tmp_path / "hf")
    texts = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    (tmp_path / "hf" / "tokenizer.json").write_text(texts)
    url, folders = f"memory://bucket/{tmp_path.name}", {"hf": tmp_path / "hf", "again": tmp_path / "again"}
    convert_checkpoint(ConvertFlags(source="hf", to="native", load=str(folders["hf"]), save=url))
    convert_checkpoint(ConvertFlags(source="native", to="hf", load=url, save=str(folders["again"])))
    weights = [load_file(folder / "model.safetensors") for folder in folders.values()]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert (folders["again"] / "tokenizer.json").read_text() == texts
    for settings in ({"source": "hf", "to": "native", "load": url}, {"source": "native", "to": "hf", "load": "a"}):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match="a URL is not accepted here"):
            convert_checkpoint(ConvertFlags(**settings, save=f"{url}/other"))
    assert not (tmp_path / "memory:").exists()


def test_flags_of_megatron_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "convert.py --model-type GPT --loader mcore --load-dir=a --save-dir b --target_tensor_parallel_size 2"
    monkeypatch.setattr("sys.argv", given.split())
    with pytest.raises(ConfigError, match="--loader --load-dir=a --save-dir --target_tensor_parallel_size: flags of"):
        main()


PROMPTS = [[5, 17, 9, 33], [41], [7, 7, 8, 2, 60, 31, 19]]


def generate(folder: Path, layout: dict[str, int]) -> list[list[int]]:
    """Greedy tokens after each of ``PROMPTS`` in a layout, all of them in one batch."""
    reader, trained = open_model(str(folder))
    config = GenerationLayout(**layout).applied(trained)
    world = this_world()
    with reader:
        groups = parallel_state.make_groups(config.parallel, world)
        engine = Engine(Generator.load(reader, config, groups, world.device))
    numbers = [engine.submit(Request(prompt=tuple(prompt), max_new_tokens=12)) for prompt in PROMPTS]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for progress in engine.step():
            found[progress.number].append(progress.token)
    return list(found.values())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["llama, YaRN", "gemma3", "mixtral", "gpt2"])
def test_greedy_text_is_theirs(name: str, tmp_path: Path) -> None:
    """Token by token, through the cache, in a batch, also over tensor- and pipeline-parallel ranks."""
    save_model(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    layouts = {}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    for world_size, layout in zip((1, 2, 2), layouts, strict=True):
        assert run_ranks(world_size, generate, tmp_path, layout) == [expected] * world_size
