"""Hybrid models of Megatron Core with Mamba-2 mixers are imported with every piece of a projection in its place."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.megatron_peer import MEGATRON
from megatron_core.checkpoint import CheckpointReader, TensorBox, find_checkpoint
from megatron_core.commands.convert_checkpoint import ConvertFlags, convert_checkpoint
from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.parallel.boxes import Box
from megatron_core.verify.ranks import run_ranks
from tests.hub import megatron_training as training
from tests.hub.megatron_files import Chunked, write_distributed
from tests.hub.test_megatron_checkpoints import GPT, VOCABULARY, imported, make_model, named
from tests.hub.test_megatron_fsdp_files import read, write
from tests.runs import tiny_run

HYBRID: dict[str, Any] = GPT | {
    "hybrid_layer_pattern": "M*-M",
    "mamba_state_dim": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 6,
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
}
INNER, STATE, HEADS = 24, 8, 6
PIECES = {
    "in_proj.weight": {"z": INNER, "x": INNER, "B": STATE, "C": STATE, "dt": HEADS},
    "conv1d.weight": {"x": INNER, "B": STATE, "C": STATE},
    "conv1d.bias": {"x": INNER, "B": STATE, "C": STATE},
}
"""Names and rows that ``MambaMixer.sharded_state_dict`` of megatron-core 0.19.2 has, in its order."""
OURS = ("x", "B", "C", "z", "dt")


def theirs(weights: dict[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
    """The tensors in HybridModel's checkpoint; ``fused``: Transformer Engine's names of norms."""
    found = {}
    for name, weight in weights.items():
        if not name.startswith("decoder.layers."):
            found[name.replace("final_layernorm", "final_norm")] = weight
            continue
        _, _, number, rest = name.split(".", 3)
        prefix, is_mixer = f"decoder.layers.{number}.", HYBRID["hybrid_layer_pattern"][int(number)] == "M"
        if not is_mixer:
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            found[prefix + rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = weight
        elif rest.startswith("input_layernorm."):
            kind = rest.rpartition(".")[2]
            found[prefix + (f"mixer.in_proj.layer_norm_{kind}" if fused else f"norm.{kind}")] = weight
        else:
            rest = rest.removeprefix("self_attention.")
            sizes = PIECES.get(rest, {})
            rows = weight.split([sizes[piece] for piece in OURS if piece in sizes]) if sizes else ()
            found |= {f"{prefix}mixer.{rest}.{piece}": each for piece, each in zip(OURS, rows, strict=False)}
            found |= {} if sizes else {f"{prefix}mixer.{'norm.weight' if rest == 'norm' else rest}": weight}
    return found


@pytest.mark.parametrize(("fused", "chunks", "pattern"), [(True, 2, "M*-M"), (False, 1, "M*|-M")])
def test_every_weight_is_in_its_place(
    fused: bool, chunks: int, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(HYBRID, biases=False)
    weights = {name: parameter.detach() for name, parameter in model.named_global_parameters()}
    args = named(HYBRID | {"hybrid_layer_pattern": pattern}, model, monkeypatch, tensor_model_parallel_size=chunks)
    stored = theirs(weights, fused=fused)
    assert {name.split("mixer.")[1] for name in stored if ".0.mixer." in name} >= {"in_proj.weight.dt", "A_log", "D"}
    extra = {name: Chunked(weight, False, 1 if len(weight) % 2 else chunks) for name, weight in stored.items()}
    write_distributed(tmp_path / "theirs", {}, args, extra=extra)
    convert_checkpoint(
        ConvertFlags(source="megatron", to="native", load=str(tmp_path / "theirs"), save=str(tmp_path / "ours"))
    )
    found = imported(tmp_path / "ours")
    assert found.config.hybrid_layer_pattern == "M*-M"
    others = dict(found.named_global_parameters())
    assert others.keys() == weights.keys()
    for name, weight in weights.items():
        rows = VOCABULARY if "word_embeddings" in name else len(weight)  # others pad the vocabulary
        assert torch.equal(others[name][:rows], weight[:rows]), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_weight_of_a_state_dict_is_in_its_place(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Megatron-FSDP, whose projections of mixers have the rows of the tensor-parallel ranks one after another."""
    model = make_model(HYBRID, biases=False)
    weights = {name: parameter.detach() for name, parameter in model.named_global_parameters()}
    args = named(HYBRID, model, monkeypatch, tensor_model_parallel_size=ranks)
    stored = theirs(weights, fused=True)
    for name in {name.rpartition(".")[0] for name in stored if name.endswith(".x")}:
        pieces = [stored.pop(f"{name}.{piece}") for piece in PIECES[name.split("mixer.")[1]]]
        stored[name] = torch.cat([piece.chunk(ranks)[rank] for rank in range(ranks) for piece in pieces])
    run_ranks(2, write, tmp_path, stored, args, "under these names", backend="gloo")
    with MegatronReader(tmp_path) as reader:
        for name, weight in weights.items():
            assert torch.equal(read(reader, f"model.{name}", weight.shape), weight), name
            assert torch.equal(read(reader, f"optimizer.exp_avg.{name}", weight.shape), 2 * weight), name


def test_a_hybrid_model_is_written_with_the_names_of_megatron_core(tmp_path: Path) -> None:
    """Also from two tensor-parallel ranks, whose parts of a projection have rows of several pieces."""
    run_ranks(2, save, str(tmp_path / "ours"))
    convert_checkpoint(
        ConvertFlags(source="native", to="megatron", load=str(tmp_path / "ours"), save=str(tmp_path / "theirs"))
    )
    found = find_checkpoint(str(tmp_path / "ours"))
    with CheckpointReader(found) as reader:
        tensors = {
            name.removeprefix("model."): reader.read(name) for name in reader.manifest.tensors if "model." in name
        }
        expected = {name: tuple(weight.shape) for name, weight in theirs(tensors, fused=True).items()}
    weights = dict(expected)
    for kind in ("exp_avg", "exp_avg_sq", "fp32_param", "param"):  # float32 weights are main weights
        expected |= {f"optimizer.state.{kind}.{name}": shape for name, shape in weights.items()}
    folder = tmp_path / "theirs" / found.name
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {name: tuple(entry.size) for name, entry in entries.items() if hasattr(entry, "size")} == expected
    for module in (
        "layers.0.mixer.in_proj",
        "layers.3.mixer.out_proj",
        "layers.1.self_attention.linear_qkv",
        "final_norm",
    ):
        assert f"decoder.{module}._extra_state/shard_0_1" in entries
    read_again(folder, tensors)


def read_again(folder: Path, tensors: dict[str, Tensor]) -> None:
    with MegatronReader(folder) as again:
        for name, weight in tensors.items():
            memory = torch.zeros_like(weight)
            box = Box((0,) * weight.dim(), tuple(weight.shape))
            again.fill([TensorBox(f"model.{name}", tuple(weight.shape), box, memory, owned=True)])
            assert torch.equal(memory, weight), name


ATTENTION_AND_MLP = {
    "hybrid_layer_pattern": "*-*-",
    "num_layers": 4,
    "normalization": "LayerNorm",
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}


def load_in_megatron(folder: str, config: ModelConfig, ids: Tensor) -> Any:
    """The logits of Megatron Core's HybridModel, with its layers that need no Transformer Engine."""
    training.use_megatron()
    core: Any = import_module("megatron.core")
    block, models = (import_module(f"megatron.core.models.hybrid.hybrid_{name}") for name in ("block", "model"))
    layer: Any = import_module("megatron.core.transformer.transformer_layer")
    spec: Any = import_module("megatron.core.transformer.spec_utils").ModuleSpec
    parts = import_module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec().submodules
    adds = import_module("megatron.core.fusions.fused_bias_dropout").get_bias_dropout_add
    import_module("megatron.core.safe_globals").register_safe_globals()
    core.parallel_state.initialize_model_parallel()
    block.TENorm = lambda config, hidden_size, eps: torch.nn.LayerNorm(hidden_size, eps)
    names = {"sharded_state_dict_keys_map": parts.sharded_state_dict_keys_map}
    attention = {"input_layernorm": parts.input_layernorm, "self_attention": parts.self_attention}
    mlp = {"pre_mlp_layernorm": parts.pre_mlp_layernorm, "mlp": parts.mlp}
    layers = {
        "attention_layer": layer.TransformerLayerSubmodules(**attention, self_attn_bda=adds, **names),
        "mlp_layer": layer.TransformerLayerSubmodules(**mlp, mlp_bda=adds, **names),
    }
    stack = {name: spec(module=layer.TransformerLayer, submodules=each) for name, each in layers.items()}
    settings = {name: getattr(config, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    model = models.HybridModel(
        import_module("megatron.core.transformer.transformer_config").TransformerConfig(
            **settings,
            ffn_hidden_size=config.ffn_size,
            add_bias_linear=False,
            use_cpu_initialization=True,
            is_hybrid_model=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
        ),
        spec(module=block.HybridStack, submodules=block.HybridStackSubmodules(**stack)),
        64,
        ids.shape[1],
        hybrid_layer_pattern=config.hybrid_layer_pattern,
        share_embeddings_and_output_weights=False,
    )
    found = core.dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(found["model"])
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    return model(ids, None, mask).detach().numpy()


@pytest.mark.skipif(not MEGATRON.is_dir(), reason="megatron-core is not installed (make install-test)")
def test_megatron_core_loads_a_hybrid_model(tmp_path: Path) -> None:
    run = tiny_run(**ATTENTION_AND_MLP, save=str(tmp_path / "ours"))
    run.saver.save(run.state)
    convert_checkpoint(
        ConvertFlags(source="native", to="megatron", load=str(tmp_path / "ours"), save=str(tmp_path / "theirs"))
    )
    folder = next((tmp_path / "theirs").glob("iter_*"))
    ids = torch.arange(12)[None] % 7
    (logits,) = run_ranks(1, load_in_megatron, str(folder), run.config.model, ids, backend="gloo")
    expected = imported(tmp_path / "ours")(ids).detach()
    torch.testing.assert_close(torch.from_numpy(logits)[..., : expected.shape[-1]], expected, rtol=1e-5, atol=1e-5)


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True, "max_position_embeddings": None}


@pytest.mark.parametrize("settings", [HYBRID | {"hybrid_layer_pattern": "ME*-"}, GPT], ids=["hybrid", "GPT"])
def test_a_training_starts_with_experts_that_were_written(settings: dict[str, Any], tmp_path: Path) -> None:
    """Megatron Core has two names of the norm before experts, and tuples in its settings."""
    run = tiny_run(**settings | EXPERTS, save=str(tmp_path / "ours"))
    run.saver.save(run.state)
    convert_checkpoint(
        ConvertFlags(source="native", to="megatron", load=str(tmp_path / "ours"), save=str(tmp_path / "theirs"))
    )
    again = tiny_run(**settings | EXPERTS, load=str(tmp_path / "theirs"), finetune=True, seed=5)
    pairs = zip(run.data_parallel.buckets, again.data_parallel.buckets, strict=True)
    assert all(torch.equal(one.weights, other.weights) for one, other in pairs)


PRODUCT = HYBRID | {"mamba_mixer": "gated_delta_product", "gdp_num_householder": 2}


def test_gated_delta_products_are_written_in_the_pieces_of_megatron_core(tmp_path: Path) -> None:
    """Names and rows are those of ``GatedDeltaProductMixer.sharded_state_dict`` in August 2026."""
    run_ranks(2, save, str(tmp_path / "ours"), PRODUCT)
    convert_checkpoint(
        ConvertFlags(source="native", to="megatron", load=str(tmp_path / "ours"), save=str(tmp_path / "theirs"))
    )
    found = find_checkpoint(str(tmp_path / "ours"))
    folder = tmp_path / "theirs" / found.name
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    mixer = "decoder.layers.0.mixer."
    stored = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    sizes = {name.removeprefix(mixer): tuple(stored[name].size) for name in stored if name.startswith(mixer)}
    convolved = {"V0": INNER, "V1": INNER, "K0": STATE, "K1": STATE, "Q": STATE}
    projected = {"z": INNER, **convolved, "b0": HEADS, "b1": HEADS, "a": HEADS}
    assert {name: sizes[name][0] for name in sizes if "1d" in name} == {
        f"conv1d.weight.{name}": rows for name, rows in convolved.items()
    }
    assert {name: sizes[name][0] for name in sizes if "in_proj.weight." in name} == {
        f"in_proj.weight.{name}": rows for name, rows in projected.items()
    }
    assert {"A_log", "dt_bias", "norm.weight", "out_proj.weight"} < sizes.keys() and "D" not in sizes
    with CheckpointReader(found) as reader:
        names = [name for name in reader.manifest.tensors if "model." in name]
        read_again(folder, {name.removeprefix("model."): reader.read(name) for name in names})
    with MegatronReader(folder) as reader:
        assert reader.settings["mamba_mixer"] == "gated_delta_product"


def without_positions(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"max_position_embeddings": None}


def save(folder: str, settings: dict[str, Any] = HYBRID) -> None:
    run = tiny_run(**without_positions(settings), tensor_model_parallel_size=2, zero_stage=1, save=folder)
    run.saver.save(run.state)


def test_half_of_adams_state_and_ratios_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(HYBRID, biases=False)
    weights = {name: parameter.detach() for name, parameter in model.named_global_parameters()}
    args = named(HYBRID, model, monkeypatch)
    stored = {name: Chunked(weight, False, 1) for name, weight in theirs(weights, fused=True).items()}
    states = {f"optimizer.state.exp_avg.{name}": each for name, each in stored.items()}
    write_distributed(tmp_path / "dist", {}, args, extra=stored | states)
    with MegatronReader(tmp_path / "dist") as reader:
        assert reader.kinds == []
        assert reader.has("model.decoder.layers.3.self_attention.norm", (INNER,))
    ratio = named({**HYBRID, "hybrid_layer_pattern": None, "hybrid_attention_ratio": 0.25}, model, monkeypatch)
    write_distributed(tmp_path / "ratio", {}, ratio, extra=stored)
    with pytest.raises(CheckpointError, match=r"hybrid_attention_ratio=0\.25, which is not supported"):
        MegatronReader(tmp_path / "ratio")
