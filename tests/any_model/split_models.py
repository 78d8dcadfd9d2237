"""Transformers models for context parallelism, their batches, and training of them with and without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import megatron_core
from tests.any_model.models import CLIP, COMMON, DECAY, LR, Result, throughout_float64, weights_of

LENGTH, BATCH, STEPS = 32, 2, 3
SIZES: dict[str, Any] = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "attention_dropout": 0.0}
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def _causal(kind: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    # Grouped products of experts have no float64.
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(_causal, "Llama"),
    "qwen3": partial(_causal, "Qwen3", use_sliding_window=True, sliding_window=5, layer_types=LAYERS),
    "gemma3": partial(_causal, "Gemma3Text", sliding_window=5, layer_types=LAYERS, query_pre_attn_scalar=7),
    "gpt-oss": partial(
        _causal, "GptOss", sliding_window=5, layer_types=LAYERS, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": partial(_causal, "Qwen3Moe", **EXPERTS),
    "glm4": partial(_causal, "Glm4"),
}
_SHARED_EXPERTS = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_SHARED_EXPERTS["n_shared_experts"] = 1
FURTHER: dict[str, Callable[[], nn.Module]] = {
    "phi-3": partial(_causal, "Phi3", sliding_window=5),
    "olmo-2": partial(_causal, "Olmo2"),
    "granite": partial(_causal, "Granite", embedding_multiplier=3.0, attention_multiplier=0.4, logits_scaling=2.0),
    "cohere-2": partial(_causal, "Cohere2", sliding_window=5, layer_types=LAYERS),
    "starcoder-2": partial(_causal, "Starcoder2", sliding_window=5, use_bias=True),
    "smollm-3": partial(_causal, "SmolLM3", no_rope_layers=[1, 0]),
    "ernie-4.5-moe": partial(_causal, "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=8),
    "qwen2-moe": partial(_causal, "Qwen2Moe", shared_expert_intermediate_size=12, **EXPERTS),
    "dots1": partial(_causal, "Dots1", layer_types=LAYERS, sliding_window=5, **_SHARED_EXPERTS),
    "mistral": partial(_causal, "Mistral", sliding_window=5),
}
"""Architectures that are read by this table alone."""
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
WITH_ROUTER_LOSS: dict[str, Callable[[], nn.Module]] = {
    "mixtral with its loss": partial(_causal, "Mixtral", num_local_experts=4, **ROUTED),
    "qwen3-moe with its loss": partial(_causal, "Qwen3Moe", **EXPERTS, **ROUTED),
    "gpt-oss with its loss": partial(
        *(_causal, "GptOss"), sliding_window=5, layer_types=LAYERS, num_local_experts=4, num_experts_per_tok=2, **ROUTED
    ),
}


class TorchModel(nn.Module):
    """A causal model of torch alone that calls scaled dot-product attention, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.positions = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(TorchLayer() for _ in range(2))
        self.head = nn.Linear(16, 48)
        # Terms of the loss with different weights: a mean over their number would be wrong.
        self.register_buffer("weights", torch.linspace(0.2, 1.8, 48), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The weighted mean loss of ``targets``, the next tokens."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        x = self.embed(tokens) + self.positions(position_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), self.weights)


class TorchLayer(nn.Module):
    """Attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, n, 16]`` -> ``[b, n, 16]``."""
        query, key, value = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


MODELS["torch"] = TorchModel


def model_of(name: str) -> nn.Module:
    """A model with the same weights in each call."""
    torch.manual_seed(0)
    model = (MODELS | FURTHER | WITH_ROUTER_LOSS)[name]()
    with torch.no_grad():  # biases, sinks and norms that are not all 0 or 1
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model


def batches_of(name: str, kind: str, count: int) -> list[dict[str, Tensor]]:
    """Micro-batches: plain, packed documents, or padded on the left or right; many labels are masked."""
    batches = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(2, 48, (BATCH, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(tokens.shape, generator=generator) < 0.3] = -100
        labels[0, : 20 + number] = -100  # most terms of a sequence are on one rank
        batch = {"input_ids": tokens, "labels": labels}
        if name == "torch":
            targets = torch.cat([labels[:, 1:], torch.full((BATCH, 1), -100)], dim=1)
            batch = {"tokens": tokens, "targets": targets}
        if kind == "packed":
            lengths = [[3, 10, 1, 18], [17, 15]]
            batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        if kind == "padded":
            mask = torch.ones_like(tokens)
            mask[0, :5] = mask[1, 25:] = 0
            labels[mask == 0] = -100
            batch["attention_mask"] = mask
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        batches.append(batch)
    return batches


def terms_of(batch: dict[str, Tensor]) -> int:
    """The number of tokens with a loss."""
    return int((batch["labels"][:, 1:] != -100).sum())


def train_with_torch(name: str, kind: str = "plain", *, by_tokens: bool = False, micro_batches: int = 2) -> Result:
    """Losses, norms, weights and the gradients of the last step, in one process with torch's AdamW.

    ``by_tokens``: the loss of a step is the mean of all its tokens, else that of its micro-batches.
    """
    model = model_of(name).double()
    batches = batches_of(name, kind, micro_batches * STEPS)
    trained = list(model.parameters())
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=1e-4)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        total = 0.0
        batches_of_step = batches[step * micro_batches : (step + 1) * micro_batches]
        tokens = sum(map(terms_of, batches_of_step)) if by_tokens else 0
        for batch in batches_of_step:
            with throughout_float64(model):
                # With a cache transformers does not separate documents.
                output = model(**batch) if name == "torch" else model(**batch, use_cache=False).loss
                loss = output * (terms_of(batch) / tokens if by_tokens else 1 / micro_batches)
                loss.backward()
            total += loss.item()
        gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model.state_dict(), model)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train_with_engine(
    name: str, kind: str, settings: dict[str, Any], *, by_tokens: bool = False, is_proven: bool = False
) -> Result:
    """The same through ``initialize`` with two micro-batches in a step; one rank of a job.

    ``is_proven``: without the proof in the first forward.
    """
    model = model_of(name)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    config = {**COMMON, "micro_batch_size": BATCH, "global_batch_size": 2 * BATCH, **settings}
    engine = megatron_core.initialize(model, config).engine
    gradients: dict[str, np.ndarray] = {}

    def read_gradients() -> None:
        trained = ((label, p) for label, p in engine.module.named_parameters() if p.requires_grad)
        for parameter_name, parameter in trained:
            gradients[parameter_name] = engine.whole.gradient(parameter).numpy().copy()

    engine.before_update = read_gradients
    if engine.context is not None:
        engine.context.is_proven = is_proven
    losses, norms = [], []
    size = engine.groups.size("dp")
    batches = batches_of(name, kind, 2 * STEPS)[engine.groups.index("dp") :: size]
    if engine.groups.size("pp") > 1:
        pending = iter(batches)
        batches = []
        for _ in range(STEPS):
            with throughout_float64(engine):
                report = engine.train_batch(pending)
            losses.append(report.loss)
            norms.append(report.grad_norm)
    for batch in batches:
        with throughout_float64(engine):
            if by_tokens:  # the model divides the sum by 1
                engine.backward(engine(**batch, num_items_in_batch=1).loss, num_terms=terms_of(batch))
            else:
                output = engine(**batch)
                engine.backward(output if isinstance(output, Tensor) else output.loss)
        report = engine.step()
        if report is not None:
            losses.append(report.loss)
            norms.append(report.grad_norm)
    weights = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items() if name in names}
    result = {"losses": losses, "norms": norms, "weights": weights}
    # With tp and ep they are parts of the model's gradients; by tokens, sums.
    if engine.groups.size("tp") == engine.groups.size("ep") == 1 and not by_tokens:
        result["gradients"] = gradients
    return result
