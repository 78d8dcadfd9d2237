"""Optimizer steps of the plain model: the objective, its gradients, clipping, updates, biases of experts, averages."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.plain.attention import Sequences
from tests.plain.experts import Collected, updated_bias, updated_quantiles
from tests.plain.model import has_experts, objective
from tests.plain.norms import Weights
from tests.plain.optimizers import adam, lamb, learning_rate, lion, muon, sgd, soap, weight_decay
from tests.plain.random_masks import dropped, uniform

RULES = {"adam": adam, "sgd": sgd, "lion": lion, "lamb": lamb}

BIASES = ("router.expert_bias", "router.qb_beta")
"""Weights without gradients."""


@dataclass
class Record:
    """The results of each step, and the weights after the last one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)
    """Auxiliary losses by name: sums over layers, without coefficients."""
    loads: list[dict[int, list[float]]] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    """After the last step."""
    average: Weights = field(default_factory=dict)
    """Moving average of the weights, which begins with the initial ones."""


def is_table(name: str) -> bool:
    """Whether a weight is that of the embedding or of the output layer."""
    return name.startswith(("embedding.", "output_layer."))


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether weight decay applies to a weight: not to biases (also of several experts) and norms."""
    return weight.dim() > 1 and not name.endswith(".bias")


def documents_of(s: SimpleNamespace, tokens: Tensor, eod: int) -> tuple[Tensor, Tensor]:
    """Positions and document numbers of tokens: a document ends with the token ``eod``, if settings separate them."""
    b, t = tokens.shape
    place = torch.arange(t).expand(b, t)
    after_end = torch.zeros_like(tokens)
    after_end[:, 1:] = (tokens[:, :-1] == eod).long()
    number = after_end.cumsum(1)
    documents = number if s.reset_attention_mask else torch.zeros_like(tokens)
    if not s.reset_position_ids:
        return place, documents
    starts = torch.stack([(number < number[:, i : i + 1]).sum(1) for i in range(t)], 1)
    return place - starts, documents


def train(s: SimpleNamespace, start: Weights, samples: list[dict[str, Tensor]], steps: int) -> Record:
    """Train on consecutive ``samples`` (tokens, labels, mask, each ``[t]``), ``global_batch_size`` in each step."""
    weights = {
        name: value.double().clone().requires_grad_() for name, value in start.items() if not name.endswith(BIASES)
    }
    weights |= {name: value.float().clone() for name, value in start.items() if name.endswith(BIASES)}
    states: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    record = Record(average={name: value.detach().clone() for name, value in weights.items()})
    consumed = 0
    for step in range(steps):
        size, length = batch_size(s, consumed), sequence_length(s, consumed)
        numbers = list(range(consumed, consumed + size))
        batch = {key: torch.stack([samples[n][key][:length] for n in numbers]) for key in samples[0]}
        before, consumed = consumed, consumed + size
        positions, documents = documents_of(s, batch["tokens"], s.vocab_size - 1)
        seq = Sequences(positions, documents, longest_of(s))

        def drop(name: str, x: Tensor, head: int = 0, numbers: list[int] = numbers) -> Tensor:
            if name.startswith(("jitter:", "sampling:", "mixing:")):
                return uniform(x.shape, s.seed, name, numbers)
            p = s.attention_dropout if name.endswith("attention_weights") else s.hidden_dropout
            return dropped(x, p, s.seed, name, numbers, head)

        loss, total, collected = objective(s, weights, batch, seq, s.micro_batch_size, drop)
        trained = {name: value for name, value in weights.items() if value.requires_grad}
        gradients = dict(zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True))
        norm = torch.stack([g.pow(2).sum() for g in gradients.values()]).sum().sqrt().item()
        record.losses.append(loss.item())
        record.norms.append(norm)
        of_layers = {name: torch.stack(values).sum().item() for name, values in collected.losses.items()}
        record.auxiliary.append(of_layers)
        record.loads.append({layer: load.tolist() for layer, load in collected.loads.items()})
        record.gradients.append(gradients)
        with torch.no_grad():
            used = (before if s.lr_one_step_later else consumed) if by_samples(s) else step + (not s.lr_one_step_later)
            for name, new in updated(s, weights, clipped(s, gradients, norm), states, step + 1, used).items():
                weights[name].copy_(new)
            update_biases(s, weights, collected)
            if s.ema_decay is not None:  # Polyak and Juditsky 1992; e = d e + (1 - d) w
                for name, value in weights.items():
                    record.average[name] = s.ema_decay * record.average[name] + (1 - s.ema_decay) * value
    record.weights = {name: value.detach() for name, value in weights.items()}
    return record


def longest_of(s: SimpleNamespace) -> int:
    """The longest text of the run, for rotary scaling."""
    return s.seq_length if s.rope_scaling_type == "longrope" else s.max_position_embeddings or s.seq_length


def clipped(s: SimpleNamespace, gradients: Weights, norm: float) -> Weights:
    """Gradients times min(1, limit / norm) (Pascanu et al. 2013, algorithm 1; torch adds 1e-6), then by value."""
    factor = min(1.0, s.clip_grad / (norm + 1e-6)) if s.clip_grad else 1.0
    limit = s.clip_grad_value or float("inf")
    return {name: (factor * g).clamp(-limit, limit) for name, g in gradients.items()}


def by_samples(s: SimpleNamespace) -> bool:
    """Whether rates follow the sequences used, as with Megatron-LM's ``train_samples``, and not the steps."""
    return s.train_samples is not None


def ramp(start: int, increment: int, samples: int, last: int, consumed: int) -> int:
    """Megatron-LM's ramp: from start to last in equal steps of an increment, over the first ``samples`` samples."""
    if consumed > samples:
        return last
    each = samples / ((last - start) // increment)
    return min(start + int(consumed / each) * increment, last)


def batch_size(s: SimpleNamespace, consumed: int) -> int:
    """Sequences of the step that follows ``consumed`` sequences."""
    if s.rampup_batch_size:
        return ramp(*s.rampup_batch_size, s.global_batch_size, consumed)
    if s.step_batch_size_schedule:
        parts = [part.split(":") for part in s.step_batch_size_schedule]
        return [int(size) for tokens, size in parts if int(tokens) <= consumed * s.seq_length][-1]
    return s.global_batch_size


def sequence_length(s: SimpleNamespace, consumed: int) -> int:
    """Tokens of a sequence of that step (Li et al. 2021, section 4)."""
    return ramp(*s.seq_length_warmup, s.seq_length, consumed) if s.seq_length_warmup else s.seq_length


def updated(s: SimpleNamespace, weights: Weights, gradients: Weights, states: dict, step: int, used: int) -> Weights:
    """The weights after update ``step``; rates are those of ``used`` steps, or sequences."""
    width = s.hidden_size / (s.mup_base_hidden_size or s.hidden_size) if s.use_mup else 1.0
    last = s.train_samples if by_samples(s) else s.train_iters
    wd = weight_decay(s, used, last)
    new = {}
    for name, g in gradients.items():
        w, state, highest, lowest = weights[name], states[name], s.lr, s.min_lr
        is_hidden = is_matrix(name, w) and not is_table(name)
        is_position = s.positions_as_matrices and name.startswith("embedding.position")
        has_own_rate = is_table(name) and not is_position and s.decoupled_lr is not None
        if has_own_rate:
            highest = s.decoupled_lr
            lowest = s.min_lr if s.decoupled_min_lr is None else s.decoupled_min_lr
        lr, eps = learning_rate(s, used, last, highest, lowest), s.adam_eps
        decays = is_matrix(name, w)
        if s.apply_wd_to_qk_layernorm and name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            decays = True
        rule = s.optimizer
        if rule in ("muon", "adaptive_muon", "soap") and not is_hidden:
            rule = s.soap_scalar_optimizer if rule == "soap" else s.muon_scalar_optimizer
        if not has_own_rate:  # Yang et al. 2022, table 8
            hidden_power = {"adam": -1, "soap": -1, "lion": -1, "sgd": 0, "lamb": 0, "muon": 0, "adaptive_muon": 0}
            lr *= width ** (hidden_power[rule] if is_hidden else int(rule == "sgd"))
            eps *= 1 / width if is_hidden and rule == "adam" else 1.0
        if rule in ("muon", "adaptive_muon"):
            new[name] = muon(s, name, w, g, state, lr, wd * decays)
        elif rule == "soap":
            new[name] = soap(s, name, w, g, state, step, lr, wd * decays)
        else:
            new[name] = RULES[rule](s, w, g, state, step, lr, wd * decays, eps)
    return new


def update_biases(s: SimpleNamespace, weights: Weights, collected: Collected) -> None:
    """Update the biases of the experts from the loads, or the balancing biases, of the step."""
    loads = collected.loads
    for name, bias in weights.items():
        if name.endswith("router.qb_beta"):
            number = int(name.split("layers.")[1].split(".")[0])
            bias.copy_(updated_quantiles(s, bias, collected.balanced[number]))
        if name.endswith("router.expert_bias"):
            number = int(name.split("layers.")[1].split(".")[0])
            layers = [number] if name.startswith("decoder") else [s.num_layers + number]
            if name.startswith("mtp") and s.mtp_use_repeated_layer:
                layers = list(range(s.num_layers, s.num_layers + s.mtp_num_layers))
            assert has_experts(s, layers[0])
            bias.copy_(updated_bias(s, bias, torch.stack([loads[layer] for layer in layers]).sum(0)))
