"""Small mixture-of-experts models of transformers, and their training with experts split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import megatron_core
from megatron_core.parallel.sharding import spec_of
from tests.any_model.models import (
    BATCH,
    COMMON,
    LLAMA,
    MODELS,
    Result,
    _causal,
    _tokens,
    loss_in,
    model_of,
    samples_of,
    throughout_float64,
)

SIZES = {**LLAMA, "num_hidden_layers": 2, "num_experts_per_tok": 2}
WITH_LOSS = {**SIZES, "output_router_logits": True, "router_aux_loss_coef": 0.1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPED: dict[str, Any] = {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
GROUPED |= {"first_k_dense_replace": 1, "n_shared_experts": 1}
OSS: dict[str, Any] = {**WITH_LOSS, "num_local_experts": 4, "head_dim": 4, "sliding_window": 4}
OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FAMILIES = {
    "mixtral": partial(_causal, "Mixtral", num_local_experts=4, **WITH_LOSS),
    "qwen3_moe": partial(_causal, "Qwen3Moe", num_experts=4, moe_intermediate_size=8, head_dim=4, **WITH_LOSS),
    "gpt_oss": partial(_causal, "GptOss", **OSS),
    "deepseek_v3": partial(_causal, "DeepseekV3", **{**SIZES, **LATENT, **GROUPED, "num_key_value_heads": 4}),
    "glm4_moe": partial(_causal, "Glm4Moe", head_dim=4, **SIZES, **GROUPED),
    "olmoe": partial(_causal, "Olmoe", num_experts=4, **WITH_LOSS),
}


def _drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with random biases and correction terms, which its initialization sets to zero."""
    model = make()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "sinks")):
                tensor.normal_(std=0.2)
    return model


def _unbalanced(choices: int) -> nn.Module:
    """gpt-oss whose tokens all choose the experts 1 and 0, or with one choice the expert 1."""
    model = _drawn(partial(_causal, "GptOss", **{**OSS, "num_experts_per_tok": choices}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.copy_(torch.tensor([20.0, 40.0, 0.0, 0.0]))
    return model


MODELS.update({name: (partial(_drawn, make), _tokens) for name, make in FAMILIES.items() if name != "mixtral"})
MODELS["mixtral with its loss"] = (partial(_drawn, FAMILIES["mixtral"]), _tokens)
MODELS["two experts for all"] = (partial(_unbalanced, 2), _tokens)
MODELS["one expert for all"] = (partial(_unbalanced, 1), _tokens)
NAMES = tuple("mixtral with its loss" if name == "mixtral" else name for name in FAMILIES)


def train(name: str, settings: dict[str, Any], model: nn.Module | None = None) -> Result:
    """Losses, norms, weights and the parts of the last gradients of this rank; one rank of a job."""
    config = {**COMMON, "global_batch_size": BATCH, **settings}
    model = model or model_of(name)
    # A pipeline drops the parameters of other stages.
    whole = {label for label, _ in model.named_parameters(remove_duplicate=False)}
    engine, _, loader, _ = megatron_core.initialize(model, config, training_data=samples_of(name), shuffle=False)
    assert loader is not None
    names = {parameter: label for label, parameter in engine.module.named_parameters()}
    parts: dict[str, list[tuple[Any, np.ndarray]]] = {}

    def read_gradients() -> None:
        for parameter, label in names.items():
            gradient = engine.whole.gradient(parameter).numpy()
            parts[label] = [(p.whole.index, gradient[p.local.index].copy()) for p in spec_of(parameter).parts]

    engine.before_update = read_gradients
    losses, norms = [], []
    batches = iter(loader)
    for _ in range(3):
        with throughout_float64(engine):
            report = engine.train_batch(batches, lambda output, batch: loss_in(output))
        losses.append(report.loss)
        norms.append(report.grad_norm)
    weights = {label: tensor.numpy() for label, tensor in engine.full_state_dict().items() if label in whole}
    return {"losses": losses, "norms": norms, "weights": weights, "parts": parts}


def gradient_error(result: Result, reference: Result) -> float:
    """The largest difference of a rank's gradients, relative to the largest entry of each."""
    errors = []
    for label, parts in result["parts"].items():
        whole = reference["gradients"][label]
        largest = max(float(np.abs(whole).max()), 1e-3)
        errors += [float(np.abs(values - whole[index]).max()) / largest for index, values in parts if values.size]
    return max(errors)


def bytes_of_experts(name: str, ranks: int) -> int:
    """The memory of the experts' weights, gradients and optimizer state on this rank."""
    config = {**COMMON, "global_batch_size": BATCH, "expert_model_parallel_size": ranks}
    engine = megatron_core.initialize(model_of(name), config).engine
    total = 0
    for label, parameter in engine.module.named_parameters():
        if ".experts." in label:
            states = [engine.whole.state(parameter, state) for state in engine.whole.state_names(parameter)]
            total += sum(tensor.nbytes for tensor in (parameter, vars(parameter)["main_grad"], *states))
    return total
