"""Small models of many kinds, their batches, and training of them in one process with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import megatron_core
from megatron_core.verify.module_report import WithoutFloat32

SAMPLES, STEPS, BATCH = 30, 3, 8
LR, DECAY, CLIP = 1e-2, 0.1, 0.5
COMMON = {"fp64": True, "micro_batch_size": 1, "lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, "adam_eps": 1e-4}


@dataclass
class Pair:
    """An output that is neither a tensor nor a dict."""

    loss: Tensor
    hidden: Tensor


class Tangled(nn.Module):
    """Tied weights, a weight used twice, parameters of the root, frozen and unused ones, a scalar buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.pos, self.scale = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 8))
        self.shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.layers[2][0].weight = self.layers[0][0].weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.rare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Pair:
        """The mean loss of predicting the next token."""
        self.calls += 1
        hidden = self.shared(self.emb(tokens) + self.pos)
        for number, layer in enumerate(self.layers):
            hidden = hidden + layer(hidden)
            hidden = hidden @ self.scale  # a weight of the root, between two units
            if number == 1:
                hidden = self.shared(hidden).sin() + self.frozen(hidden)
        if int(tokens[0, 0]) % 3 == 0:  # other samples leave these parameters without a gradient
            hidden = hidden + self.rare(hidden)
        logits = self.head(hidden)
        return Pair(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), hidden)


class Convolutions(nn.Module):
    """Convolutions with batch norm, as ``nn.Sequential`` of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self._block(a, b) for a, b in ((2, 4), (4, 6), (6, 4))))
        self.head = nn.Linear(4, 3)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """(Loss, logits)."""
        logits = self.head(self.blocks(image).mean((2, 3)))
        return nn.functional.cross_entropy(logits, label), logits


def _causal(kind: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(vocab_size=32, max_position_embeddings=16, **settings)
    # Grouped products of experts have no float64.
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
VIT |= {"image_size": 8, "patch_size": 4, "num_channels": 2}


def _gpt2(layers: int = 3) -> nn.Module:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, **sizes, **rates))


def _bert() -> nn.Module:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
    sizes = {key: value for key, value in VIT.items() if key not in ("image_size", "patch_size", "num_channels")}
    config = transformers.BertConfig(vocab_size=32, **sizes, **rates)
    return transformers.BertForSequenceClassification(config)


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(2, 32, (7,), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(2, 32, (7,), generator=generator),
        "labels": torch.randint(3, (), generator=generator),
    }


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(3, (), generator=generator)}


def _pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    image = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)
    return image, torch.randint(3, (), generator=generator)


def _plain(generator: torch.Generator) -> Tensor:
    return torch.randint(11, (5,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "tangled": (Tangled, _plain),
    "convolutions": (Convolutions, _pair),
    "gpt2": (_gpt2, _tokens),
    "gpt2 of 4 layers": (partial(_gpt2, 4), _tokens),
    "llama": (partial(_causal, "Llama", **LLAMA), _tokens),
    "qwen3": (partial(_causal, "Qwen3", head_dim=4, **LLAMA), _tokens),
    "mixtral": (partial(_causal, "Mixtral", num_local_experts=4, **LLAMA), _tokens),
    "vit": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)), _image),
    "bert": (_bert, _text),
}


def model_of(name: str) -> nn.Module:
    """A model with the same weights in each call."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def samples_of(name: str, count: int = SAMPLES) -> list[Any]:
    """The data set."""
    return [MODELS[name][1](torch.Generator().manual_seed(number)) for number in range(count)]


Result = dict[str, Any]


def train_with_torch(
    name: str, batch_size: int = BATCH, steps: int = STEPS, prepare: Callable[[Any], None] = lambda model: None
) -> Result:
    """Losses, norms, gradients and weights of a loop in one process: torch's AdamW and clipping, one sample at a time.

    Gradients are those of the last step. ``prepare`` may change the model first.
    """
    model, samples = model_of(name).double(), samples_of(name)
    prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=1e-4)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        total = 0.0
        for sample in samples[step * batch_size : (step + 1) * batch_size]:
            batch = torch.utils.data.default_collate([sample])
            with throughout_float64(model):
                loss = loss_in(call(model, batch)) / batch_size
                loss.backward()
            total += loss.item()
        for parameter in trained:  # an unused parameter has a gradient of zero in flat buffers
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model.state_dict(), model)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train_with_engine(name: str, **settings: Any) -> Result:
    """The same through ``initialize``; one rank of a job."""
    config = {**COMMON, "global_batch_size": BATCH, **settings}
    engine, _, loader, _ = megatron_core.initialize(
        model_of(name), config, training_data=samples_of(name), shuffle=False
    )
    losses, norms = [], []
    for batch in loader:
        with throughout_float64(engine):
            engine.backward(loss_in(call(engine, batch)))
        report = engine.step()
        if report is not None:
            losses.append(report.loss)
            norms.append(report.grad_norm)
    return {"losses": losses, "norms": norms, "weights": weights_of(engine.full_state_dict(), engine.module)}


def train_in_stages(name: str, steps: int, settings: dict[str, Any]) -> Result:
    """The same in pipeline stages, with the gradients of this rank; one rank of a job."""
    model = model_of(name)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    engine, _, loader, _ = megatron_core.initialize(
        model, {**COMMON, **settings}, training_data=samples_of(name), shuffle=False
    )
    batches, losses, norms, gradients = iter(loader), [], [], {}

    def read_gradients() -> None:
        for parameter, place in engine.staged.places.items():
            if parameter.requires_grad:
                gradients[place.name] = engine.whole.gradient(parameter).numpy().copy()

    engine.before_update = read_gradients
    for _ in range(steps):
        with throughout_float64(engine):
            report = engine.train_batch(batches, lambda output, batch: loss_in(output))
        losses.append(report.loss)
        norms.append(report.grad_norm)
    weights = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items() if name in names}
    own = {} if engine.groups.size("tp") > 1 else {"gradients": gradients}  # with tp, parts of them
    return {"losses": losses, "norms": norms, "weights": weights, **own}


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def throughout_float64(model: nn.Module) -> AbstractContextManager[Any]:
    """Compute forward and backward (with recomputation) of a float64 model without its casts to float32.

    Casts stay in models with FP8 products, whose scales are float32 by definition.
    """
    is_narrow = getattr(model, "fp8", None) is not None
    return WithoutFloat32() if next(model.parameters()).dtype == torch.float64 and not is_narrow else nullcontext()


def loss_in(output: Any) -> Tensor:
    """The loss in an output."""
    return output[0] if isinstance(output, tuple) else output.loss


def weights_of(state: dict[str, Tensor], model: nn.Module) -> dict[str, np.ndarray]:
    """Parameters without buffers, which each rank has of its own."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor.numpy().copy() for name, tensor in state.items() if name in names}


def difference(a: Result, b: Result) -> float:
    """The largest difference of losses, norms, weights and the gradients in ``a``, relative to their size."""
    if len(a["losses"]) != len(b["losses"]):
        return float("inf")
    assert a["weights"].keys() == b["weights"].keys()
    own = a.get("gradients", {})
    pairs = [(np.array(a[kind]), np.array(b[kind])) for kind in ("losses", "norms")]
    pairs += [(gradient, b["gradients"][name]) for name, gradient in own.items()]
    pairs += [(a["weights"][name], b["weights"][name]) for name in a["weights"]]
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-3)) for x, y in pairs)
