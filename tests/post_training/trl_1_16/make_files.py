"""Train with trl's losses to create the JSON files: python -m tests.post_training.trl_1_16.make_files.

It needs trl 1.16.0, transformers 5.24.0 and torch 2.13.0. The losses are trl's; the model is transformers', and the
optimizer torch's.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer, RewardTrainer
from trl.experimental.gkd import GKDTrainer

from tests.post_training.trl_1_16 import critic_inputs
from tests.post_training.trl_1_16 import policy_inputs as inputs
from tests.training.trl_1_16.inputs import load_model, save_inputs


class OnlyLoss(GRPOTrainer):
    """A GRPOTrainer without its constructor: only the attributes that its loss reads."""

    def __init__(self, model: torch.nn.Module, settings: dict[str, Any]) -> None:
        self.model = model
        self.loss_type = settings["loss_type"]
        self.beta = settings.get("beta", 0.0)
        self.epsilon_low = settings.get("epsilon_low", 0.2)
        self.epsilon_high = settings.get("epsilon_high", 0.2)
        self.importance_sampling_level = settings.get("importance_sampling_level", "token")
        self.use_vllm = self.vllm_importance_sampling_correction = settings.get("use_vllm", False)
        self.entropy_coef = settings.get("entropy_coef", 0.0)
        self._entropy_bonus_enabled = self.entropy_coef > 0
        self.use_adaptive_entropy = self.aux_loss_enabled = False
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.current_gradient_accumulation_steps = 1
        self.max_completion_length = inputs.LONGEST_ANSWER
        self.args = SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        )
        self.accelerator = SimpleNamespace(
            num_processes=1, sync_gradients=False, reduce=lambda x, reduction: x, gather=lambda x: x
        )
        self._metrics: Any = defaultdict(lambda: defaultdict(list))

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, kept: int, **_: Any
    ) -> tuple[Any, ...]:
        """As trl's, in float64 instead of float32."""
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -kept - 1 : -1]
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, ids[:, -kept:, None])[..., 0], entropy, None


def batch_of(answers: list[inputs.Sampled]) -> dict[str, torch.Tensor]:
    """The answers, padded, in the entries of trl's batches."""
    longest = max(len(answer.answer) for answer in answers)

    def padded(rows: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=dtype)

    old = padded([a.old_log_probs for a in answers], torch.float64)
    sampler = padded([a.sampler_log_probs for a in answers], torch.float64)
    tool_mask = padded([a.mask for a in answers], torch.int64)
    return {
        "prompt_ids": torch.tensor([a.prompt for a in answers]),
        "prompt_mask": torch.ones(len(answers), inputs.PROMPT_LENGTH, dtype=torch.int64),
        "completion_ids": padded([a.answer for a in answers], torch.int64),
        "completion_mask": padded([[1] * len(a.answer) for a in answers], torch.int64),
        "tool_mask": tool_mask,
        "advantages": torch.tensor([a.advantage for a in answers], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded([a.reference_log_probs for a in answers], torch.float64),
        "importance_sampling_ratio": (old - sampler).exp().clamp(max=inputs.CORRECTION_CAP),
        "num_items_in_batch": tool_mask.sum(),
    }


class OnlyRewardLoss(RewardTrainer):
    """A RewardTrainer without its constructor."""

    def __init__(self, model: torch.nn.Module, settings: dict[str, Any]) -> None:
        self.model = model
        self.args = SimpleNamespace(center_rewards_coefficient=settings.get("center_rewards_coefficient"))
        self.accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
        self._total_train_tokens = 0
        self._tp_size = 1
        self._metrics: Any = defaultdict(lambda: defaultdict(list))


def pairs_of(step: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The texts of a step in the entries of trl's batches: all chosen ones, then all rejected ones."""
    texts, margins = critic_inputs.pairs(step)
    longest = max(map(len, texts))
    ordered = [*texts[0::2], *texts[1::2]]
    batch = {
        "input_ids": torch.tensor([text + [0] * (longest - len(text)) for text in ordered]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in ordered]),
    }
    if settings.get("margins"):
        batch["margin"] = torch.tensor(margins, dtype=torch.float64)
    return batch


def reward_steps(folder: Path, settings: dict[str, Any]) -> list[list[float]]:
    """The loss and the gradient norm of each step of a reward model."""
    model = critic_inputs.load_value_model(folder).train()
    forward = model.forward

    def without_margin(*args: Any, margin: torch.Tensor | None = None, **inputs: Any) -> Any:
        return forward(*args, **inputs)

    model.forward = without_margin
    trainer = OnlyRewardLoss(model, settings)
    return updates(model, lambda step: trainer.compute_loss(model, pairs_of(step, settings)))


def steps(folder: Path, settings: dict[str, Any]) -> list[list[float]]:
    """The loss and the gradient norm of each step."""
    model = load_model(folder).train()
    trainer = OnlyLoss(model, settings)
    return updates(model, lambda step: trainer._compute_loss(model, batch_of(inputs.sampled(step))))


def divergence_steps(folder: Path, teacher_folder: Path, settings: dict[str, float]) -> list[list[float]]:
    """The loss and the gradient norm of each step of on-policy distillation."""
    model = load_model(folder).train()
    teacher = load_model(teacher_folder).eval()

    def loss_of(step: int) -> torch.Tensor:
        logits: dict[Any, list[torch.Tensor]] = {model: [], teacher: []}
        labels = []
        for answer in inputs.sampled(step):
            ids = torch.tensor([[*answer.prompt, *answer.answer]])
            for each, rows in logits.items():
                rows.append(each(input_ids=ids).logits[:, inputs.PROMPT_LENGTH - 1 : -1])
            labels.append(torch.where(torch.tensor([answer.mask]) > 0, ids[:, inputs.PROMPT_LENGTH :], -100))
        of_student, of_teacher = (torch.cat(rows, 1) for rows in logits.values())
        return GKDTrainer.generalized_jsd_loss(of_student, of_teacher.detach(), torch.cat(labels, 1), **settings)

    return updates(model, loss_of)


def updates(model: torch.nn.Module, loss_of: Callable[[int], torch.Tensor]) -> list[list[float]]:
    """The loss and the gradient norm of each step of AdamW."""
    hidden = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": hidden, "weight_decay": inputs.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=inputs.LEARNING_RATE, betas=(0.9, 0.99))
    results = []
    for step in range(inputs.STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results.append([loss.item(), norm.item()])
    return results


def main() -> None:
    """Write the files."""
    with tempfile.TemporaryDirectory() as name:
        save_inputs(Path(name))
        found = {kind: steps(Path(name), settings) for kind, settings in inputs.KINDS.items()}
    _write("steps.json", found)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        save_inputs(Path(name))
        critic_inputs.save_teacher(Path(other))
        kinds = critic_inputs.DIVERGENCES
        _write("divergence_steps.json", {k: divergence_steps(Path(name), Path(other), v) for k, v in kinds.items()})
    with tempfile.TemporaryDirectory() as name:
        critic_inputs.save_value_model(Path(name))
        _write("reward_steps.json", {k: reward_steps(Path(name), v) for k, v in critic_inputs.REWARDS.items()})


def _write(name: str, results: dict[str, list[list[float]]]) -> None:
    (Path(__file__).parent / name).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
