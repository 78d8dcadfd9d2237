"""Hybrid models of Megatron Core on CPU ranks: plain kernels replace those of mamba_ssm and flash-linear-attention."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from benchmarks.megatron_peer import MEGATRON
from tests.hub import megatron_training as training

HYBRID: dict[str, Any] = training.LLAMA | {
    "num_layers": 4,
    "hybrid_layer_pattern": "M*-M",
    "mamba_state_dim": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 6,
}
DELTA_NETS: dict[str, Any] = HYBRID | {
    "hybrid_layer_pattern": "G*-M",
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
NETS = {name: value for name, value in DELTA_NETS.items() if name.startswith("linear_")}
NETS |= {"experimental_attention_variant": "gated_delta_net", "attention_output_gate": True, "apply_layernorm_1p": True}
QWEN_NEXT: dict[str, Any] = training.LLAMA | NETS | {"linear_attention_freq": 2}
"""A GPT model with a delta net and a gated attention layer."""
CENTERED: dict[str, Any] = QWEN_NEXT | {"normalization": "LayerNorm", "apply_layernorm_1p": False}
"""The same with layer norms, also of the outputs of the net's heads."""
QWEN_EXPERTS: dict[str, Any] = training.EXPERTS | NETS
QWEN_EXPERTS |= {"linear_attention_freq": [1, 0], "moe_shared_expert_intermediate_size": 24}
QWEN_EXPERTS |= {"moe_shared_expert_gate": True, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.4}
"""A delta net, attention, and attention in the layer of multi-token prediction, each with experts."""
HAS_EINOPS = (MEGATRON / "einops").is_dir()


class GatedNorm(nn.Module):
    """RMS norm of ``x silu(z)`` in groups of ``group_size`` channels, with the arguments of mamba_ssm's RMSNorm."""

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.group = nn.Parameter(torch.ones(size, dtype=dtype)), eps, group_size or size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Both of shape [..., channels]."""
        groups = (x * silu(z)).unflatten(-1, (-1, self.group))
        found = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return found.flatten(-2) * self.weight


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    *,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None = None,
    dt_softplus: bool = True,
    return_final_states: bool = False,
    initial_states: Tensor | None = None,
) -> Tensor:
    """The recurrence of mamba_ssm's ``mamba_chunk_scan_combined``, token by token.

    x [batch, length, heads, channels], dt [batch, length, heads], b and c [batch, length, groups, states].
    """
    assert z is None and initial_states is None and dt_softplus and not return_final_states
    steps = softplus(dt.float() + dt_bias)
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (b, c))
    state, found = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[3]), []
    for t in range(x.shape[1]):
        added = (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = state * torch.exp(steps[:, t] * a)[..., None, None] + added
        found.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(found, 1).to(x)


def of_length_one(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """The function ``l2norm`` of flash-linear-attention."""
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("only --deterministic-mode is used, which calls torch's operators")


def load_hybrid() -> None:
    """Import Megatron Core with Mamba-2 mixers and gated delta nets in this forked process."""
    names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "fla", "fla.modules", "fla.ops")
    functions = {
        "fla.modules.convolution": {"causal_conv1d": _unused},
        "fla.modules.l2norm": {"l2norm": of_length_one},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _unused},
    }
    for name in (*names, *functions):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(functions.get(name, {}))
    norms, scans = (ModuleType(f"{names[2]}.{name}") for name in ("layernorm_gated", "ssd_combined"))
    vars(norms)["RMSNorm"] = GatedNorm
    vars(scans).update(mamba_chunk_scan_combined=scan, mamba_split_conv1d_scan_combined=scan)
    sys.modules |= {norms.__name__: norms, scans.__name__: scans}
    dynamo: Any = import_module("torch._dynamo")
    dynamo.config.disable = True  # Megatron Core compiles functions of gated delta nets
    training.load_megatron()
    norms: Any = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    norms.__new__ = partial(_norm, norms.__new__)


class CenteredNorm(nn.RMSNorm):
    """RMS norm with the factors 1 + weight, which Megatron Core has from Transformer Engine only."""

    def reset_parameters(self) -> None:
        """Set the weights to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same shape."""
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def _norm(make: Any, cls: type, config: Any, hidden_size: int, eps: float, **kwargs: Any) -> nn.Module:
    if not config.layernorm_zero_centered_gamma:
        made: nn.Module = make(cls, config, hidden_size, eps, **kwargs)
        return made
    norm = CenteredNorm(hidden_size, eps)
    vars(norm.weight)["sequence_parallel"] = config.sequence_parallel
    return norm


def delta_net(norm: Any, keys: dict[str, str], **mlp: Any) -> Any:
    """The specification of a layer with a gated delta net; ``keys``: names of norms and their names in checkpoints."""
    layer: Any = import_module("megatron.core.transformer.transformer_layer")
    spec: Any = import_module("megatron.core.transformer.spec_utils").ModuleSpec
    nets: Any = import_module("megatron.core.ssm.gated_delta_net")
    linear: Any = import_module("megatron.core.tensor_parallel")
    of_net = nets.GatedDeltaNetSubmodules(linear.ColumnParallelLinear, norm, linear.RowParallelLinear)
    submodules = layer.TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=spec(module=nets.GatedDeltaNet, submodules=of_net),
        self_attn_bda=import_module("megatron.core.fusions.fused_bias_dropout").get_bias_dropout_add,
        sharded_state_dict_keys_map=keys | {"input_layernorm.": "self_attention.in_proj.layer_norm_"},
        **mlp,
    )
    return spec(module=layer.TransformerLayer, submodules=submodules)


def sparse_attention(config: Any, attention: Any) -> Any:
    """The layer ``attention`` with DeepSeek sparse attention in its place."""
    variants: Any = import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    backends: Any = import_module("megatron.core.models.backends")
    linear: Any = import_module("megatron.core.tensor_parallel")
    backend = backends.LocalSpecProvider()
    backend.linear = lambda: training.Replicated
    made = variants.get_dsa_module_spec_for_backend(config, backend)
    made.submodules.linear_q_down_proj = made.submodules.linear_kv_down_proj = linear.ColumnParallelLinear
    attention.submodules.self_attention = made
    return attention


def block_of_variant(config: Any, attention: Any, vp_stage: int | None) -> Any:
    """The layers of a stage of a GPT model: ``attention``, or the same with a delta net or sparse attention instead.

    Source: ``get_transformer_block_with_experimental_attention_variant_spec``, which needs Transformer Engine.
    """
    variants: Any = import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    blocks: Any = import_module("megatron.core.transformer.transformer_block")
    parts = attention.submodules
    if config.experimental_attention_variant == "dsa":
        layers = [sparse_attention(config, attention)] * config.num_layers
    else:
        mlp = {name: getattr(parts, name) for name in ("pre_mlp_layernorm", "mlp", "mlp_bda")}
        net = delta_net(parts.input_layernorm, parts.sharded_state_dict_keys_map, **mlp)
        layers = [net if is_net else attention for is_net in variants.get_linear_attention_pattern(config)]
    first = variants.get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = blocks.get_num_layers_to_build(config, vp_stage=vp_stage)
    return blocks.TransformerBlockSubmodules(
        layer_specs=layers[first : first + count], layer_norm=parts.input_layernorm
    )


def hybrid_model(config: Any, shape: dict[str, Any], **stage: Any) -> nn.Module:
    """A ``HybridModel`` whose layers need no Transformer Engine; parameters have the names of checkpoints with it."""
    block, models = (import_module(f"megatron.core.models.hybrid.hybrid_{name}") for name in ("block", "model"))
    layer: Any = import_module("megatron.core.transformer.transformer_layer")
    mamba, mixer = (import_module(f"megatron.core.ssm.mamba_{name}") for name in ("layer", "mixer"))
    linear: Any = import_module("megatron.core.tensor_parallel")
    spec: Any = import_module("megatron.core.transformer.spec_utils").ModuleSpec
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    parts, of_experts = (
        specs.get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=shape["qk_layernorm"], normalization=shape["normalization"]
        ).submodules
        for experts in (None, shape.get("num_experts", 1))
    )
    adds = import_module("megatron.core.fusions.fused_bias_dropout").get_bias_dropout_add
    block.TENorm = parts.input_layernorm
    names = {"sharded_state_dict_keys_map": parts.sharded_state_dict_keys_map}
    projections = mixer.MambaMixerSubmodules(linear.ColumnParallelLinear, linear.RowParallelLinear)
    attention = {"input_layernorm": parts.input_layernorm, "self_attention": parts.self_attention}
    mlp = {"pre_mlp_layernorm": parts.pre_mlp_layernorm, "mlp": parts.mlp}
    stack = {
        "mamba_layer": spec(
            module=mamba.MambaLayer,
            submodules=mamba.MambaLayerSubmodules(
                norm=parts.input_layernorm,
                mixer=spec(module=mixer.MambaMixer, submodules=projections),
                mamba_bda=adds,
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        ),
        "attention_layer": spec(
            module=layer.TransformerLayer,
            submodules=layer.TransformerLayerSubmodules(**attention, self_attn_bda=adds, **names),
        ),
    }
    if "G" in shape["hybrid_layer_pattern"]:
        stack["gdn_layer"] = delta_net(parts.input_layernorm, {})
    for name, own in (("mlp_layer", {**mlp, **names}), ("moe_layer", mlp | {"mlp": of_experts.mlp})):
        submodules = layer.TransformerLayerSubmodules(**own, mlp_bda=adds)
        stack[name] = spec(module=layer.TransformerLayer, submodules=submodules)
    if shape.get("mtp_num_layers"):
        ahead: Any = import_module("megatron.core.transformer.multi_token_prediction")
        norm = parts.input_layernorm
        own = ahead.MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=linear.ColumnParallelLinear, layer_norm=norm
        )
        each = spec(module=ahead.MultiTokenPredictionLayer, submodules=own)
        block_parts = ahead.MultiTokenPredictionBlockSubmodules(layer_specs=[each])
        stack["mtp_block_spec"] = spec(module=ahead.MultiTokenPredictionBlock, submodules=block_parts)
    model: nn.Module = models.HybridModel(
        config,
        spec(module=block.HybridStack, submodules=block.HybridStackSubmodules(**stack)),
        training.VOCABULARY,
        training.LENGTH,
        hybrid_layer_pattern=shape["hybrid_layer_pattern"],
        share_embeddings_and_output_weights=not shape["untie_embeddings_and_output_weights"],
        position_embedding_type=shape["position_embedding_type"],
        **stage,
    )
    return model
