"""Models of Hugging Face are imported and exported unchanged, give the same results, and can be trained in every
layout."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from megatron_core.checkpoint import Box, TensorBox, parameter_pieces
from megatron_core.checkpoint.formats import formats_of_settings
from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face import HuggingFaceReader, settings_of_folder
from megatron_core.hub.hugging_face.architecture import architecture_for, architecture_of, function_settings
from megatron_core.hub.hugging_face.reader import _vocab_size
from megatron_core.hub.hugging_face.writer import Group, write_weights
from megatron_core.hub.logits import their_logits
from megatron_core.models import GPTModel
from megatron_core.parallel import World
from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.training.pretrain import notes, read_settings
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from megatron_core.vocabularies.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.hub.hf_models import (
    DEEPSEEK_YARN,
    LONGROPE_OF_EXPERTS,
    MODELS,
    RECURRENT,
    VOCABULARY,
    save_model,
    transformers,
)
from tests.runs import TINY, tiny_run
from tests.sample import WHOLE_MATRIX
from tests.vocabularies.corpus import write_gpt2_files, write_sentence_piece, write_tokenizer_json


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:  # C43
    """The same logits, and bytewise equal tensors with the same names after export."""
    save_model(name, tmp_path / "theirs")
    # States add up rounding errors: transformers' Qwen3-Next in float32 differs by 8.5e-6 from itself in float64.
    bound = 8.5e-6 if name.startswith(RECURRENT) else 2e-6
    assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < bound
    assert export_hugging_face(tmp_path / "ours", tmp_path / "again") < bound
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"
    model_types = {
        transformers.AutoConfig.from_pretrained(tmp_path / folder).model_type for folder in ("theirs", "again")
    }
    assert len(model_types) == 1, "transformers reads the exported config.json as another architecture"


def test_the_length_of_the_model_is_stored_or_told(tmp_path: Path) -> None:
    """640 positions from config.json, not the 64 tokens of --seq-length's default."""
    save_model("llama", tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 640}))
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours", verify=False)
    flags = ["--load", str(tmp_path / "ours"), "--use-checkpoint-args", "--mock-data", "--train-iters", "1"]
    assert read_settings("p", flags)[0].data.seq_length == 640
    flags = ["--load-hf", str(tmp_path / "theirs"), "--mock-data", "--train-iters", "1"]
    told = "seq_length=64 is the default, and the model of load_hf="
    for more, expected in (([], 1), (["--seq-length", "32"], 0)):
        config, _ = read_settings("p", flags + more)
        run = set_up(config, World(0, 1, 0, torch.device("cpu")))
        found = [each for each in notes(run) if each.startswith(told)]
        assert len(found) == expected and all("has 640 positions; set" in each for each in found)


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [
        ("mixtral", "--moe-aux-loss-coeff", "moe_aux_loss_coeff=0.001 is .*here false.; --moe-aux-loss-coeff 0 trains"),
        ("glm4_moe", "--moe-router-bias-update-rate", "moe_router_bias_update_rate=0.001: every step changes"),
    ],
)
def test_the_balance_of_experts_is_noted(name: str, flag: str, expected: str, tmp_path: Path) -> None:
    """By default transformers adds no balancing loss, and trains no biases of experts."""
    save_model(name, tmp_path)
    flags = ["--load-hf", str(tmp_path), "--mock-data", "--train-iters", "1"]
    for more, number in (([], 1), ([flag, "0"], 0)):
        config, _ = read_settings("p", flags + more)
        (form, folder), *_ = formats_of_settings(config)
        assert len([note for note in form.notes(folder, config) if re.search(expected, note)]) == number


@pytest.mark.parametrize("name", ["gpt_neox", "falcon_h1"])
def test_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    """For architectures with other residual connections or layers, in float64."""
    save_model(name, tmp_path)
    ids = torch.randint(1, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    logits = theirs(input_ids=ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    with HuggingFaceReader(tmp_path) as reader:
        parallel = ModelParallelConfig(params_dtype=torch.float64)
        model = GPTModel(reader.model, VOCABULARY, 64, parallel=parallel).eval()
        reader.fill(parameter_pieces(model.named_global_parameters()))
        model(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
    # Their gradients, stored as their weights are, are read as weights.
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    if name == "gpt_neox":
        wanted["embed_out.weight"] = wanted.pop("lm_head.weight")  # stored under its old name
    save_file(wanted, tmp_path / "model.safetensors")
    with HuggingFaceReader(tmp_path) as reader:
        gradients = GPTModel(reader.model, VOCABULARY, 64, parallel=parallel)
        reader.fill(parameter_pieces(gradients.named_global_parameters()))
    for (name, own), their in zip(model.named_parameters(), gradients.parameters(), strict=True):
        # Their rotary table is float32 in a float64 model, too, and so are their Mamba-2 mixers.
        torch.testing.assert_close(own.grad, their.data, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_reads_its_part(name: str, tmp_path: Path) -> None:
    """A rank's boxes equal parts of the whole tensors, and only the boxes are read."""
    save_model(name, tmp_path)
    with HuggingFaceReader(tmp_path) as reader:
        for rank in range(2):
            parallel = ModelParallelConfig(params_dtype=torch.float32, perform_initialization=False)
            model = GPTModel(reader.model, VOCABULARY, 64, parallel=parallel, tp_group=LocalGroup(2, rank))
            pieces = list(parameter_pieces(model.named_global_parameters()))
            reader.fill(pieces)
            for piece in pieces:
                whole = torch.empty(piece.global_shape)
                box = Box((0,) * whole.dim(), piece.global_shape)
                reader.fill([TensorBox(piece.name, piece.global_shape, box, whole, owned=True)])
                assert torch.equal(piece.memory, whole[piece.box.index])


def _losses(folder: Path, layout: dict[str, Any]) -> list[float]:
    settings = TINY | settings_of_folder(folder) | {"seq_length": 16, "load_hf": str(folder), "fp64": True}
    run = tiny_run(**settings | layout)
    return [train_step(run).loss for _ in range(2)]


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2 dp2, ZeRO-1": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "tp2 pp2, sp": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
}
NAMES = ("llama, tied", "gpt_neox", "olmo2", "gemma2")
SAMPLE = list(zip(NAMES, ["tp2 pp2, sp", "tp2", "pp2 dp2, ZeRO-1", "tp2 pp2, sp"], strict=True))
"""Each architecture and each layout once."""
EXPERTS = {"ep2": {"expert_model_parallel_size": 2}}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name, layout in product(NAMES, LAYOUTS) if WHOLE_MATRIX or (name, layout) in SAMPLE),
        ("mixtral", "ep2"),
    ],
)
def test_training_goes_on_from_it_in_every_layout(name: str, layout: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    (alone,) = run_ranks(1, _losses, tmp_path, {})
    world_size = 2 if layout in ("tp2", "ep2") else 4
    for losses in run_ranks(world_size, _losses, tmp_path, (LAYOUTS | EXPERTS)[layout]):
        assert losses == pytest.approx(alone, rel=1e-9)


ADAM = {"lr": 3e-3, "adam_eps": 1e-5, "weight_decay": 0.0, "clip_grad": 1.0, "lr_decay_style": "constant"}
UNBALANCED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "exaone_moe", "deepseek_v3", "qwen3_next"])
def test_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Losses and gradient norms of three steps; without the parts of training that notes at the start name."""
    save_model(name, tmp_path)
    settings = TINY | settings_of_folder(tmp_path) | ADAM | {"seq_length": 16, "load_hf": str(tmp_path), "fp64": True}
    experts = UNBALANCED if settings.get("num_experts") else {}
    run = tiny_run(**settings | experts | {"global_batch_size": 4, "micro_batch_size": 2})
    batches: list[list[MicroBatch]] = []
    divide = run.micro_batches
    run.micro_batches = lambda batch: batches.append(divide(batch)) or batches[-1]  # type: ignore[func-returns-value]
    ours = [train_step(run) for _ in range(3)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = None  # padding has a gradient here
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.0)
    for step, batch in zip(ours, batches, strict=False):
        tokens, labels, mask = (
            torch.cat([getattr(part, name) for part in batch]) for name in ("tokens", "labels", "loss_mask")
        )
        logits = model(input_ids=tokens).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses * mask.flatten()).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (step.loss, step.grad_norm) == pytest.approx((loss.item(), norm.item()), rel=1e-5)


def test_flags_override_the_folder_and_a_checkpoint_takes_precedence(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "hf")
    config, _ = read_settings("x", ["--load-hf", str(tmp_path / "hf"), "--seq-length", "32", "--rotary-base", "5"])
    assert (config.model.qk_layernorm, config.model.kv_channels, config.data.vocab_size) == (True, 16, VOCABULARY)
    assert (config.data.seq_length, config.model.rotary_base) == (32, 5.0)
    assert config.checkpoint.hf_model_type == "qwen3"
    with pytest.raises(CheckpointError, match=r"rotary_base=5\.0, but the checkpoint was trained with"):
        tiny_run(**{**TINY, **config.flat(), "mock_data": True, "train_iters": 1})
    import_hugging_face(tmp_path / "hf", tmp_path / "ours", verify=False)
    both = {"load_hf": "nowhere", "load": str(tmp_path / "ours"), "finetune": True, "seq_length": 16}
    run = tiny_run(**TINY | settings_of_folder(tmp_path / "hf") | both)
    stored = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(run.stages[0].embedding.word_embeddings.weight[:VOCABULARY], stored)


def test_several_files_and_another_dtype(tmp_path: Path) -> None:
    """In 16 bits, split into several files, as for large models."""
    save_model("llama", tmp_path / "theirs", torch.bfloat16, max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    export_hugging_face(tmp_path / "ours", tmp_path / "again", dtype=torch.float32)
    stored = load_file(tmp_path / "again" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "float32"
    for path in (tmp_path / "theirs").glob("*.safetensors"):
        for key, tensor in load_file(path).items():
            assert torch.equal(stored[key], tensor.float())


def test_a_mistral_file_with_kinds_of_layers_is_ministral(tmp_path: Path) -> None:
    save_model("ministral", tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mistral"}))
    assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < 2e-6
    assert export_hugging_face(tmp_path / "ours", tmp_path / "again") < 2e-6
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "ministral"


def test_kimi_k2_goes_out_as_deepseek_v3(tmp_path: Path) -> None:
    """transformers has no class for it, and reads the export."""
    save_model("deepseek_v3, another epsilon", tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours", verify=False)
    assert export_hugging_face(tmp_path / "ours", tmp_path / "again") < 2e-6
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "deepseek_v3"
    stored, exported = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert stored.keys() == exported.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in stored.items())


def test_every_weight_keeps_its_dtype(tmp_path: Path) -> None:
    """Norms in float32 next to matrices in bfloat16, as after training with adapters."""
    save_model("qwen3", tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs/model.safetensors")
    mixed = {key: value if "norm" in key else value.bfloat16() for key, value in stored.items()}
    save_file(mixed, tmp_path / "theirs/model.safetensors", {"format": "pt"})
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    export_hugging_face(tmp_path / "ours", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert all(value.dtype == mixed[key].dtype and torch.equal(value, mixed[key]) for key, value in again.items())
    assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_weights_are_written_in_files_of_a_limited_size(tmp_path: Path) -> None:
    tensors = {name: torch.full((size,), float(size)) for name, size in (("a", 4), ("b", 100), ("c", 2), ("d", 2))}
    groups: list[Group] = [([(n, t.dtype, tuple(t.shape))], lambda t=t: [t]) for n, t in tensors.items()]
    write_weights(tmp_path, groups, file_bytes=20)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == dict(zip("abcd", (*names, names[2]), strict=True))
    assert index["metadata"]["total_size"] == 4 * 108
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_model_trained_here_goes_out(tmp_path: Path) -> None:  # C21 C43
    """The model's own positions, after a training step, for GPT-2; settings without an architecture are refused."""
    settings = {"openai_gelu": True, "save": str(tmp_path / "ours"), "train_iters": 1}
    run = tiny_run(**settings)
    train_step(run)
    run.saver.save(run.state)
    export_hugging_face(tmp_path / "ours", tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (theirs["model_type"], theirs["n_positions"], theirs["n_inner"]) == ("gpt2", 16, 128)
    ids = torch.arange(16)[None] * 3
    run.stages[0].eval()
    torch.testing.assert_close(their_logits(tmp_path / "theirs", [ids])[0], run.stages[0](ids), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="architecture llama cannot have the settings"):
        export_hugging_face(tmp_path / "ours", tmp_path / "no", model_type="llama")
    with pytest.raises(CheckpointError, match="not empty"):
        export_hugging_face(tmp_path / "ours", tmp_path / "theirs")


def test_a_hybrid_model_trained_here_goes_out(tmp_path: Path) -> None:  # C43
    """Steps of Mamba-2 have no lower bound by default; a value that no config.json can have is in the message."""
    sizes = {"mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 8, "position_embedding_type": "none"}
    llm = {"normalization": "RMSNorm", "disable_bias_linear": True, "squared_relu": True, "train_iters": 1}
    hybrid = {"hybrid_layer_pattern": "M-*", "num_layers": 3, "untie_embeddings_and_output_weights": True}
    run = tiny_run(**sizes, **llm, **hybrid, save=str(tmp_path / "ours"))
    run.saver.save(run.state)
    assert export_hugging_face(tmp_path / "ours", tmp_path / "theirs") < 1e-5
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (theirs["model_type"], theirs["time_step_min"]) == ("nemotron_h", 1e-20)
    assert settings_of_folder(tmp_path / "theirs")["mamba_dt_min"] == 0
    wide = ModelConfig(**sizes, hybrid_layer_pattern="M", hidden_size=32, num_layers=1, mamba_num_heads=3)
    with pytest.raises(CheckpointError, match=r"mamba2: config.json says expand=1; expand x hidden_size=32 must be"):
        architecture_for(wide, "mamba2")


def test_a_tokenizer_of_any_name_goes_out_under_theirs(tmp_path: Path) -> None:  # C43
    """Also with equal ids, although the architecture's own tokenizer splits words differently."""
    file = write_tokenizer_json(tmp_path).rename(tmp_path / "mine.json")
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(file), "vocab_size": None}
    qwen3 = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
    run = tiny_run(**tokenizer, **qwen3, qk_layernorm=True, save=str(tmp_path / "ours"), train_iters=1)
    run.saver.save(run.state)
    export_hugging_face(tmp_path / "ours", tmp_path / "theirs", model_type="qwen3", verify=False)
    assert (tmp_path / "theirs" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert settings_of_folder(tmp_path / "theirs")["tokenizer_model"] == str(tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs", local_files_only=True)
    text = "don't 12345\n    a\u0301 \u212b"
    ours = HuggingFaceTokenizer(file)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.tokenize(text)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos, None)


def test_files_of_other_tokenizers_go_out_under_theirs(tmp_path: Path) -> None:
    vocabulary, merges = write_gpt2_files(tmp_path)
    vocabulary, merges = vocabulary.rename(tmp_path / "gpt2-vocab.json"), merges.rename(tmp_path / "gpt2-merges.txt")
    files = {"vocab_file": str(vocabulary), "merge_file": str(merges)}
    run = tiny_run(
        tokenizer_type="GPT2BPETokenizer", **files, vocab_size=None, save=str(tmp_path / "ours"), train_iters=1
    )
    run.saver.save(run.state)
    export_hugging_face(tmp_path / "ours", tmp_path / "theirs", verify=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs", local_files_only=True)
    text = "don't 12345\n    two"
    assert theirs(text)["input_ids"] == GPT2BPETokenizer(vocabulary, merges).tokenize(text)


def test_a_sentencepiece_model_goes_out_under_theirs(tmp_path: Path) -> None:
    file = write_sentence_piece(tmp_path, keep_spaces=True)
    tokenizer = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(file), "vocab_size": None}
    llama = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
    run = tiny_run(**tokenizer, **llama, save=str(tmp_path / "ours"), train_iters=1)
    run.saver.save(run.state)
    export_hugging_face(tmp_path / "ours", tmp_path / "theirs", verify=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs", local_files_only=True)
    text = "don't 12345\n two  \u65e5\u672c"
    ours = SentencePieceTokenizer(file)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.tokenize(text)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_tensors(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


BAD = {
    "model_type": (
        lambda f: _edit(f, model_type="bert"),
        "model_type='bert', which is not supported; docs/hugging_face.md lists those that are; ",
    ),
    "activation": (lambda f: _edit(f, hidden_act="relu"), "hidden_act='relu'; for llama only 'silu' is supported"),
    "rope": (lambda f: _edit(f, rope_parameters={"rope_type": "odd"}), "rope_type='odd'"),
    "groups": (lambda f: _edit(f, num_key_value_heads=3), "cannot be split over num_query_groups=3; legal: 1, 2, 4"),
    "sizes": (lambda f: _edit(f, intermediate_size=40), r"has the shape \[48, 32\], config.json asks for \[40, 32\]"),
    "missing": (lambda f: _edit_tensors(f, **{"model.norm.weight": None}), "missing: model.norm.weight"),
    "unused": (lambda f: _edit_tensors(f, extra=torch.ones(1)), "unexpected: extra"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "damaged": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
    "no file": (lambda f: (f / "config.json").unlink(), "no such file; give the folder of a downloaded model"),
    "no JSON": (lambda f: (f / "config.json").write_text("["), "cannot be read as JSON"),
}


OF_SHAPES = {"num_query_groups", "kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size", "q_lora_rank"}
"""Settings whose defaults differ from those of transformers: wrong ones do not match the stored tensors."""


@pytest.mark.parametrize("name", MODELS)
def test_a_key_left_out_means_what_it_means_there(name: str) -> None:
    """Or is refused: files of the hub omit values that were defaults of the release that wrote them.

    Positions that are null have defaults in some architectures, too.
    """
    kind, settings = MODELS[name]
    of_kind = getattr(transformers, f"{kind}Config")
    of_layers = ("layer_types", "no_rope_layers", "layer_rope_theta")
    settings = {key: value for key, value in settings.items() if key not in of_layers}
    deep = {key: 8 for key in ("num_hidden_layers", "n_layer") if key in settings}
    full = {key: value for key, value in of_kind(**settings | deep).to_dict().items() if value is not None}
    full = {key: value for key, value in full.items() if key not in of_layers}
    compared = 0
    for key in (*full, None):
        changed = {"rope_parameters": None} if key is None else {}
        left = {other: value for other, value in full.items() if other != key} | changed
        try:
            theirs = of_kind(**left).to_dict()
            ours = architecture_of(left).settings(left)
        except (CheckpointError, StrictDataclassError, ValueError, TypeError):
            continue  # refused here or there
        assert _computes(ours) == _computes(architecture_of(theirs).settings(theirs)), key
        compared += 1
    assert compared > 5


def _computes(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function_settings(ModelConfig(**settings)).items() if name not in OF_SHAPES}


REFUSED = {
    "quantized": ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantized weights are not supported"),
    "number of heads": ("llama", {"num_attention_heads": None}, "has no num_attention_heads; llama models need it"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads=0; it must be an integer from 1 to"),
    "no causal mask": ("llama", {"is_causal": False}, "is_causal=False; for llama only True is supported"),
    "another activation": ("gpt_neox", {"hidden_act": "relu"}, "hidden_act='relu'; for gpt_neox supported are gelu,"),
    "a number as text": ("llama", {"hidden_size": "32"}, "hidden_size='32'; it must be an integer from 1 to"),
    "size of the vocabulary": ("llama", {"vocab_size": None}, "vocab_size=None"),
    "rotary channels": ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    "a factor": ("llama", {"rope_parameters": {"rope_type": "linear"}}, "it needs a factor"),
    "positions by layer": ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5}}}, "one set of param"),
    "longrope": ("phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 4}}, "it needs a short_"),
    "another scaling": ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "for phi3 supported are"),
    "scales of longrope": (
        "phi3, longrope",
        {"rope_parameters": LONGROPE_OF_EXPERTS},
        "short_mscale=1.2; with longrope",
    ),
    "a factor for no frequency": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 0]}},
        r"short_factor=\[1, 0\]",
    ),
    "positions by their distance": ("falcon", {"alibi": True}, "alibi=True; for falcon only False"),
    "sizes of a mixer": ("bamba", {"mamba_d_head": 5}, "mamba_d_head=5; mamba_n_heads=8 x mamba_d_head must be"),
    "other rotary channels": (
        "bamba",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25; for bamba only 0.5",
    ),
    "kinds of mixers": ("granitemoehybrid, tied", {"layer_types": ["mamba"] * 2}, "layer_types="),
    "kinds of operators": ("lfm2", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    "biases of convolutions": ("lfm2", {"conv_bias": True}, "conv_bias=True; for lfm2 only False is supported"),
    "one of LFM2's experts": ("lfm2_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1; lfm2_moe models need 2"),
    "one of DeepSeek's experts": ("glm4_moe_lite", {"num_experts_per_tok": 1}, "num_experts_per_tok=1; glm4_moe_lite"),
    "one of Kimi's experts": ("kimi_linear", {"num_experts_per_token": 1}, "num_experts_per_token=1; kimi_linear mod"),
    "one of Nemotron's experts": ("nemotron_h, experts", {"num_experts_per_tok": 1}, "num_experts_per_tok=1; nemot"),
    "a factor before norms": ("nanochat", {"rope_parameters": DEEPSEEK_YARN}, "rope_type='yarn'; nanochat models have"),
    "another activation of nanochat": ("nanochat", {"hidden_act": "silu"}, "hidden_act='silu'; for nanochat only"),
    "another norm": (
        "granitemoehybrid, tied",
        {"normalization_function": "layernorm"},
        "normalization_function='layernorm'; for granitemoehybrid only 'rmsnorm'",
    ),
    "learned positions": (
        "granitemoehybrid, tied",
        {"position_embedding_type": "learned_absolute"},
        "position_embedding_type='learned_absolute'; supported are rope, and nope",
    ),
    "a third norm": ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2; supported are 1"),
    "one after the other": (
        "falcon, groups, two norms",
        {"parallel_attn": False},
        "parallel_attn=False; new_decoder_architecture=true has",
    ),
    "another order of layers": (
        "cohere2",
        {"order_of_interleaved_layers": "global_attn_first"},
        "order_of_interleaved_layers='global_attn_first'",
    ),
    "one expert": ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1; transformers chooses 2"),
    "longrope with experts": (
        "phimoe",
        {"rope_parameters": {"rope_type": "longrope"}},
        "longrope with short_mscale and long_mscale",
    ),
    "bias": ("mistral, window", {"attention_bias": True}, "attention_bias=True"),
    "an empty window": ("mistral, window", {"sliding_window": 0}, "1 or more, or null"),
    "kinds of layers": ("qwen3", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 4}, "layer_types"),
    "shared choices of keys": ("glm_moe_dsa", {"index_topk_freq": 4}, "index_topk_freq=4; only 1"),
    "a pattern of shared choices": ("deepseek_v32", {"index_topk_pattern": "FSSF"}, "index_topk_pattern='FSSF'"),
    "halves in an indexer": ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
    "pairs in an indexer": ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True"),
    "halves of latent attention": ("deepseek_v32", {"rope_interleave": False}, "rope_interleave=False"),
    "unknown kinds of MLPs": ("glm_moe_dsa", {"mlp_layer_types": ["moe"] * 4}, "supported are sparse and dense"),
    "kinds without windows": ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window=False; but"),
    "other scores": ("deepseek_v3", {"scoring_func": "softmax"}, "only 'sigmoid' is supported"),
    "null for what is on": ("deepseek_v3", {"rope_interleave": None}, "rope_interleave=None"),
    "latent rotary channels": ("deepseek_v3", {"head_dim": 8}, "head_dim=8; supported is qk_rope_head_dim"),
    "null for a size": ("gemma3", {"query_pre_attn_scalar": None}, "has no query_pre_attn_scalar; gemma3_text models"),
    "no scale": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0; it must be a finite number above 0"),
    "bounded scores": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0; for gemma3_text only"),
    "shared experts": ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0"),
    "half of YaRN's scale": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN | {"mscale": None}}, "mscale_all_dim"),
    "scaled positions of windows": (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "for sliding_attention only default",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(fault: str) -> None:
    name, changes, message = REFUSED[fault]
    kind, settings = MODELS[name]
    theirs = getattr(transformers, f"{kind}Config")(**settings).to_dict() | changes
    with pytest.raises(CheckpointError, match=message):
        ModelConfig(**architecture_of(theirs).settings(theirs))
        _vocab_size(architecture_of(theirs), theirs)


@pytest.mark.parametrize("fault", BAD)
def test_bad_folders_are_one_sentence_and_write_nothing(fault: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "theirs")
    spoil, message = BAD[fault]
    spoil(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=message):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


def test_an_output_layer_beside_tied_embeddings_has_to_be_the_same(tmp_path: Path) -> None:
    save_model("llama, tied", tmp_path / "theirs")
    weight = load_file(tmp_path / "theirs" / "model.safetensors")["model.embed_tokens.weight"]
    _edit_tensors(tmp_path / "theirs", **{"lm_head.weight": weight.clone()})
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours", verify=False)
    _edit_tensors(tmp_path / "theirs", **{"lm_head.weight": weight + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding, but config\.json says tie"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "other", verify=False)


def test_a_file_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "theirs", max_shard_size="20KB")
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(CheckpointError, match="not in the same folder"):
        HuggingFaceReader(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "cause"), [("llama", "damaged"), ("deepseek_v32", "equal index scores .*--no-verify")]
)
def test_another_function_is_refused(name: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits reveal settings that this project does not support."""
    save_model(name, tmp_path / "theirs")
    monkeypatch.setattr(
        "megatron_core.hub.logits.their_logits",
        lambda folder, prompts: [1.001 * logits for logits in their_logits(folder, prompts)],
    )
    with pytest.raises(CheckpointError, match=rf"differ by 1.0e-03 of the largest one.*{cause}.*; nothing was written"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_what_transformers_refuses_is_one_sentence(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "theirs")
    _edit(tmp_path / "theirs", use_cache="x")
    with pytest.raises(CheckpointError, match=r"^transformers .* cannot compute the logits of .*'use_cache'.*--no-v"):
        import_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("layers", [0, 1])
def test_layers_of_multi_token_prediction_are_left_out(
    layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek's files store them after the other layers; without their number in config.json they are unexpected
    tensors."""
    save_model("deepseek_v3", tmp_path / "theirs")
    weights, settings = tmp_path / "theirs" / "model.safetensors", tmp_path / "theirs" / "config.json"
    further = {"model.layers.4.enorm.weight": torch.ones(32), "model.layers.4.eh_proj.weight": torch.ones(32, 64)}
    save_file(load_file(weights) | further, weights, {"format": "pt"})
    config = json.loads(settings.read_text())
    config.pop("num_mtp_layers", None)
    settings.write_text(json.dumps(config | {"num_nextn_predict_layers": layers}))
    if layers:
        assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < 2e-6
        assert (
            "layers for multi-token prediction (2 tensors, 2,080 parameters), which are not" in capsys.readouterr().out
        )
    else:
        with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.4\.eh_proj"):
            import_hugging_face(tmp_path / "theirs", tmp_path / "ours")


def test_a_constant_of_an_architecture_has_to_have_its_value(tmp_path: Path) -> None:
    save_model("apertus", tmp_path)
    for beta, legal in ((0.5, True), (0.25, False)):
        _edit_tensors(tmp_path, **{"model.layers.1.mlp.act_fn.beta": torch.tensor(beta)})
        if legal:
            HuggingFaceReader(tmp_path)
        else:
            with pytest.raises(
                CheckpointError, match=r"layers\.1\.mlp\.act_fn\.beta is 0\.25; apertus models have 0\.5"
            ):
                HuggingFaceReader(tmp_path)
