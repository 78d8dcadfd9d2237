"""Checkpoints of Megatron-LM in many layouts are imported with every weight in its place, and execute no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.checkpoint import CheckpointReader, TensorBox, find_checkpoint, parameter_pieces
from megatron_core.commands.convert_checkpoint import ConvertFlags, convert_checkpoint
from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import import_megatron
from megatron_core.hub.hugging_face import HuggingFaceReader
from megatron_core.hub.megatron_lm import MegatronReader, settings_of_arguments
from megatron_core.hub.megatron_lm.arguments import training_settings
from megatron_core.models import GPTModel
from megatron_core.parallel.boxes import Box
from megatron_core.training.compatibility import stored_config
from tests.hub.megatron_files import Ranges, arguments, write_distributed, write_rank_files

VOCABULARY = 61
GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 8,
    "untie_embeddings_and_output_weights": False,
    "swiglu": False,
}
LLAMA = GPT | {
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "normalization": "RMSNorm",
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = LLAMA | {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "qk_layernorm": True}


def make_model(settings: dict[str, Any], *, biases: bool) -> GPTModel:
    """A random model, including norms and biases."""
    config = ModelConfig(**settings, disable_bias_linear=not biases)
    torch.manual_seed(0)
    model = GPTModel(config, VOCABULARY, 16).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def named(settings: dict[str, Any], model: GPTModel, monkeypatch: pytest.MonkeyPatch, **layout: int) -> Any:
    """The arguments of its training; the vocabulary is padded, and the kernel with a fused bias is disabled."""
    defaults = {"num_experts": None, "bias_gelu_fusion": False, "add_bias_linear": model.config.add_bias_linear}
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "vocab_size": VOCABULARY}
    return arguments(monkeypatch, **defaults | sizes | settings | {"seq_length": 16, "padded_vocab_size": 64} | layout)


def imported(folder: Path) -> GPTModel:
    """The model in a checkpoint of ours."""
    found = find_checkpoint(str(folder))
    config = stored_config(found)
    with CheckpointReader(found) as reader:
        model = GPTModel(config.model, reader.state["vocab_size"], config.max_positions).eval()
        reader.fill(parameter_pieces(model.named_global_parameters()))
    return model


def assert_same(model: GPTModel, again: GPTModel) -> None:
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    before, after = (dict(each.named_global_parameters()) for each in (model, again))
    assert before.keys() == after.keys()
    for name, parameter in before.items():
        rows = VOCABULARY if name.startswith(("embedding.word", "output_layer")) else None
        assert torch.equal(parameter[:rows], after[name][:rows]), name
    with torch.no_grad():
        assert torch.equal(model(ids), again(ids))


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
RANK_FILES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "gpt": (GPT, {}, {}),
    "gpt tp2 pp2": (GPT, TP2 | PP2, {}),
    "llama tp2 pp2, two chunks, TE": (LLAMA, TP2 | PP2, {"chunks": 2, "fused": True}),
    "experts tp2 ep2": (EXPERTS, TP2 | {"expert_model_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("name", RANK_FILES)
def test_files_of_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, layout, how = RANK_FILES[name]
    model = make_model(settings, biases=settings is GPT)
    args = named(settings, model, monkeypatch, **layout)
    write_rank_files(tmp_path / "theirs", weights_of(model), args, **how)
    import_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert_same(model, imported(tmp_path / "ours"))


def test_integers_in_place_of_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(GPT, biases=True)
    weights, name = weights_of(model), "decoder.layers.1.mlp.linear_fc2.weight"
    write_rank_files(
        tmp_path / "theirs", weights | {name: weights[name].to(torch.int8)}, named(GPT, model, monkeypatch)
    )
    with pytest.raises(CheckpointError, match=rf"{name} has the dtype torch\.int8; weights must be F64"):
        import_megatron(tmp_path / "theirs", tmp_path / "ours")


def weights_of(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_global_parameters()}


DISTRIBUTED: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "gpt": (GPT, {}),
    "llama": (LLAMA, {}),
    "llama, by layer": (LLAMA, {"stacked": False}),
    "llama, halves": (LLAMA, {"halves": True}),
    "experts": (EXPERTS, {}),
}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, how = DISTRIBUTED[name]
    model = make_model(settings, biases=settings is GPT)
    write_distributed(tmp_path / "theirs", weights_of(model), named(settings, model, monkeypatch, **TP2), **how)
    import_megatron(tmp_path / "theirs", tmp_path / "ours", step=7)
    assert_same(model, imported(tmp_path / "ours"))


def test_to_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one command, verified by transformers; no temporary files remain."""
    model = make_model(LLAMA, biases=False)
    folder = tmp_path / "theirs"
    write_rank_files(folder, weights_of(model), named(LLAMA, model, monkeypatch, **TP2, **PP2))
    said = convert_checkpoint(ConvertFlags(source="megatron", to="hf", load=str(folder), save=str(tmp_path / "hf")))
    assert "(hf); logits differ by" in said and sorted(path.name for path in tmp_path.iterdir()) == ["hf", "theirs"]
    with HuggingFaceReader(tmp_path / "hf") as reader:
        again = GPTModel(reader.model, VOCABULARY, 16).eval()
        reader.fill(parameter_pieces(again.named_global_parameters()))
    assert_same(model, again)


class Run:
    """Functions that a pickle must not call."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def _plant(path: Path) -> None:
    torch.save({"args": Run()}, path)


def _plant_metadata(path: Path) -> None:
    path.write_bytes(pickle.dumps(Run()))


def _change(folder: Path, **values: Any) -> None:
    path = folder / "mp_rank_00/model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | values, path)


FAULTS: dict[str, tuple[bool, Any, str]] = {
    "an object": (False, lambda f: _plant(f / "mp_rank_00/model_optim_rng.pt"), r"mkdir, which is not allowed"),
    "an object in the metadata": (
        True,
        lambda f: _plant_metadata(f / ".metadata"),
        r"mkdir, which is not allowed",
    ),
    "damaged metadata": (True, lambda f: (f / ".metadata").write_bytes(b"\x80\x05x"), r"\.metadata cannot be read"),
    "damaged": (False, lambda f: (f / "mp_rank_00/model_optim_rng.pt").write_bytes(b"x" * 99), "cannot be read"),
    "a missing rank": (False, lambda f: (f / "mp_rank_01/model_optim_rng.pt").unlink(), "has no mp_rank_01/"),
    "a missing file": (True, lambda f: next(f.glob("*.distcp")).unlink(), "is missing or not a file"),
    "another version": (False, lambda f: _change(f, checkpoint_version=2.0), "checkpoint_version is 2.0; 3.0"),
    "no model": (False, lambda f: _change(f, model=None), "model is a NoneType; it must be a dict"),
    "no arguments": (False, lambda f: torch.save({"model": {}}, f / "mp_rank_00/model_optim_rng.pt"), "no arguments"),
    "nothing": (True, lambda f: (f / ".metadata").unlink(), "has neither .metadata"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_folders_are_one_sentence_and_run_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed, spoil, message = FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    model = make_model(GPT, biases=True)
    write = write_distributed if distributed else write_rank_files
    write(tmp_path / "theirs", weights_of(model), named(GPT, model, monkeypatch, **TP2))
    spoil(tmp_path / "theirs/iter_0000007")
    with pytest.raises(CheckpointError, match=message) as found:
        import_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "ours").exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "unexpected: decoder.layers.3"),
        (
            {"ffn_hidden_size": 64},
            r"decoder.layers.0.mlp.linear_fc1.weight has the shape \[128, 32\], .* ask for \[64, 32\]",
        ),
        ({"tensor_model_parallel_size": "x"}, "tensor_model_parallel_size of the checkpoint is 'x'; it must be an int"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type='mrope', which is not supported"),
        ({"hybrid_layer_pattern": "D-"}, "hybrid_layer_pattern='D-', which is not supported: layers D have indexers"),
    ],
)
def test_arguments_that_do_not_fit(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(GPT, biases=True)
    args = named(GPT, model, monkeypatch)
    write_rank_files(tmp_path, weights_of(model), args)
    content = torch.load(tmp_path / "iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=False)
    vars(content["args"]).update(change)
    torch.save(content, tmp_path / "iter_0000007/mp_rank_00/model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=message):
        import_megatron(tmp_path, tmp_path / "ours")


def test_a_training_with_detached_heads_does_not_continue() -> None:
    with pytest.raises(CheckpointError, match=r"mtp_detach_heads=True, which is not supported; use the weights alone"):
        training_settings({"lr": 1e-3, "mtp_num_layers": 2, "mtp_detach_heads": True})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"step_batch_size_schedule": "0:2 1K:8"}, {"step_batch_size_schedule": ("0:2", "1K:8")}),
        ({"rampup_batch_size": ["2", "2", "40"]}, {"global_batch_size": 8, "rampup_batch_size": (2, 2, 40)}),
        # A ramp that took effect, and one that Megatron Core 0.19 ignored.
        (
            {"rampup_batch_size": [2, 2, 40], "curr_iteration": 4, "consumed_train_samples": 10},
            {"global_batch_size": 8, "rampup_batch_size": (2, 2, 40)},
        ),
        (
            {"rampup_batch_size": [2, 2, 40], "curr_iteration": 4, "consumed_train_samples": 40},
            {"global_batch_size": 8},
        ),
    ],
)
def test_a_batch_that_grows(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = training_settings({"global_batch_size": 8, **arguments})
    assert {name: value for name, value in settings.items() if "batch_size" in name} == expected


def test_meanings_that_differ() -> None:
    """Of arguments with the same name or another one."""
    base = {"num_layers": 2, "add_bias_linear": True, "bias_gelu_fusion": True}
    assert settings_of_arguments(base)["openai_gelu"], "the fused kernel is the approximation"
    assert "openai_gelu" not in settings_of_arguments(base | {"swiglu": True})
    assert settings_of_arguments(base | {"add_bias_linear": False})["disable_bias_linear"]
    yarn = settings_of_arguments(base | {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0})
    assert (yarn["rope_scaling_type"], yarn["rope_scaling_factor"]) == ("yarn", 4.0)
    latest = base | {"position_embedding_type": "yarn", "rotary_scaling_factor": 1.0}
    assert settings_of_arguments(latest | {"yarn_rotary_scaling_factor": 32.0})["rope_scaling_factor"] == 32.0
    assert settings_of_arguments(latest | {"enable_gpt_oss": True})["rope_scaling_factor"] == 32.0
    assert yarn["original_max_position_embeddings"] == 4096
    both = base | {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_scaling_factor": 1.0}
    assert settings_of_arguments(both)["rope_scaling_factor"] == 32.0, "the other argument is of YaRN"
    assert settings_of_arguments(both | {"position_embedding_type": "yarn"})["rope_scaling_factor"] == 1.0
    nets = base | {"linear_attention_freq": [0, 1], "experimental_attention_variant": "gated_delta_net"}
    assert settings_of_arguments(nets | {"experimental_attention_variant": "gdn"}) == settings_of_arguments(nets)
    assert settings_of_arguments(nets)["linear_attention_freq"] == (0, 1)
    assert settings_of_arguments(base | {"moe_layer_freq": 1, "num_experts": None}).get("moe_layer_freq") is None
    assert settings_of_arguments(base | {"moe_layer_freq": [0, 1], "num_experts": 2})["moe_layer_freq"] == (0, 1)


def test_a_box_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(LLAMA, biases=False)
    write_distributed(tmp_path, weights_of(model), named(LLAMA, model, monkeypatch, **TP2))
    whole = weights_of(model)["decoder.layers.2.mlp.linear_fc1.weight"]
    box = Box((40, 3), (90, 20))
    memory = torch.empty(box.shape)
    with MegatronReader(tmp_path) as reader:
        reader.fill([TensorBox("model.decoder.layers.2.mlp.linear_fc1.weight", tuple(whole.shape), box, memory, True)])
    assert torch.equal(memory, whole[box.index])


def test_flattened_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of ``fully_sharded_model_space``: ranges of the elements of each tensor-parallel rank's block."""
    model = make_model(LLAMA, biases=False)
    weights, rest = weights_of(model), "mlp.linear_fc2.weight"
    layers = range(LLAMA["num_layers"])
    stacked = torch.stack([weights[f"decoder.layers.{layer}.{rest}"] for layer in layers])
    blocks = torch.stack(stacked.chunk(2, dim=2), dim=1).reshape(len(layers), 1, 2, -1)  # columns of two ranks
    extra = {f"optimizer.state.exp_avg.decoder.layers.{rest}": Ranges(blocks, 100)}
    args = named(LLAMA, model, monkeypatch, **TP2)
    write_distributed(tmp_path, weights, args, extra=extra)
    parts = MegatronReader(tmp_path)._optimizer["exp_avg"][f"decoder.layers.3.{rest}"]
    assert len(parts) == 2
    for part in parts:
        assert torch.equal(part.read(), weights[f"decoder.layers.3.{rest}"][part.box.index])


def test_a_named_pipe_as_tracker_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    with pytest.raises(CheckpointError, match="has neither latest_checkpointed_iteration"):
        MegatronReader(tmp_path)
