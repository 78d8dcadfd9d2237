"""The training actor of slime over ``Trainer``: its ``TrainRayActor`` of August 2026.

slime's rollouts, rewards and loop stay as they are. Pass the class to the function with which slime's ``train.py``
creates its models::

    create_training_models(args, pgs, rollout_manager, actor_cls=slime_trainer())
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError, DataError
from megatron_core.features.preferences.frozen import load_frozen
from megatron_core.parallel import World
from megatron_core.post_training.advantages import generalized_advantages
from megatron_core.post_training.hugging_face_weights import in_buckets, save_weights
from megatron_core.post_training.objectives import (
    TokenObjective,
    clipped_loss,
    kl_estimate,
    sequence_clipped_loss,
    value_loss,
    weight_clipped_loss,
    with_kl,
    with_sampler_correction,
)
from megatron_core.post_training.slime_settings import config_of_arguments
from megatron_core.post_training.step_data import gather_by_data_rank
from megatron_core.post_training.token_batch import TokenBatch, TokenLoss
from megatron_core.post_training.trainer import FrozenPolicy, Trainer
from megatron_core.post_training.trajectories import Trajectory
from megatron_core.training.compatibility import open_model

STATE = "slime"
"""Name of the values that ``save_model`` adds to a checkpoint."""
GROUP = "slime-pp_0"
"""Name of the group in which rank 0 sends weights to slime's engines."""
_POSITION = attrgetter("position")
SENDER = "slime.backends.megatron_utils.update_weight.update_weight_from_distributed"


@dataclass
class RolloutText:
    """A text of a rollout, with numbers for each of the r tokens of its response, float64 ``[r]``."""

    tokens: list[int]
    mask: Tensor
    reward: float
    mask_sum: float
    """Number of learned tokens of all texts of its rollout."""
    position: tuple[int, int]
    """The data-parallel rank that received it, and its number there."""
    numbers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def scored(self) -> Trajectory:
        """The text, for numbers of all tokens of the response."""
        return Trajectory(self.tokens, self._mask([1] * len(self.mask)))

    def learned(self, weight: float, names: Mapping[str, str]) -> Trajectory:
        """The text with the learned tokens' numbers: values of an objective, by their names here."""
        values = {value: self.numbers[name][self.mask > 0] for value, name in names.items()}
        return Trajectory(self.tokens, self._mask(self.mask.int().tolist()), {**values, "weight": weight})

    def _mask(self, of_response: list[int]) -> list[int]:
        return [0] * (len(self.tokens) - 1 - len(of_response)) + of_response


class SlimeTrainer:
    """One rank of slime's training actor; the names and arguments of public methods are slime's.

    slime gives each data-parallel rank its own texts, but references to all of them: every rank fetches all, and the
    trainer divides them as its layout needs. slime's micro-batches are not used.
    """

    flags: Mapping[str, Any] = {}
    """Settings of ``megatron-train`` in addition to slime's arguments."""
    rollout_manager: Any = None
    """Set by slime's ``set_rollout_manager``."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        """Join the other ranks, build the model and load it; returns the number of the first rollout."""
        self.args = args
        self.role = role
        if args.debug_rollout_only:
            return 0
        super().init(args, role, with_ref, with_opd_teacher)  # type: ignore[misc]
        self._world = World.from_environment()
        config = config_of_arguments(args, role, self.flags, self._world.size)
        self._trainer = Trainer(config, self._world)
        self.train_parallel_config = self._get_parallel_config()
        self._reference = self._frozen("ref_load") if with_ref else None
        self._teacher = self._frozen("opd_teacher_load") if with_opd_teacher else None
        self._version: int = getattr(args, "update_weight_start_version", 0)
        self._group: Any = None
        self._logging = importlib.import_module("slime.observability.logging_utils")
        if self._trainer.is_first_rank:
            self._logging.init_tracking(args, primary=False, role=role)
        first = self._trainer.stored.get(STATE, {"rollout_id": -1})["rollout_id"] + 1
        if args.offload_train:
            self.sleep()
        return int(first)

    def _frozen(self, setting: str) -> FrozenPolicy:
        run = self._trainer.run
        weights, _ = open_model(getattr(self.args, setting), device=run.world.device, name=setting)
        return FrozenPolicy(self._trainer, load_frozen(run, run.config, run.layer_specs, weights))

    def _get_parallel_config(self) -> dict[str, int]:
        """The layout for which slime divides the texts."""
        groups = self._trainer.run.groups
        sizes = {f"{axis}_size": groups.size(axis) for axis in ("dp", "cp")}
        return {**sizes, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}

    def sleep(self, tags: Any = None) -> None:
        """Free the device: weights and optimizer state go to host memory."""
        self._trainer.offload()

    def wake_up(self, tags: Any = None) -> None:
        """Undo ``sleep``."""
        self._trainer.onload()

    # Steps.

    def train(self, rollout_id: int, rollout_data_ref: Sequence[Any], external_data: Any = None) -> Any:
        """Take the steps of a rollout. A critic returns its values of this rank's texts, for the actor's
        ``external_data``."""
        if self.args.debug_rollout_only:
            return None
        if self.args.offload_train:
            self.wake_up()
        steps, sizes = self._steps_of(rollout_data_ref)
        samples = list(chain.from_iterable(steps))
        result = None
        if self.role == "critic":
            _set(samples, "values", self._trainer.values([sample.scored for sample in samples]))
            local = [sample for sample in samples if sample.position[0] == self._trainer.run.groups.index("dp")]
            result = {"values": [sample.numbers["values"] for sample in sorted(local, key=_POSITION)]}
        else:
            self._score(samples, external_data)
        if self.args.compute_advantages_and_returns:
            set_advantages(self.args, samples)
        for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
            self._log(rollout_id * len(steps) + number, self._take_step(step, size))
        if self.args.offload_train:
            self.sleep()
        return result

    def _steps_of(self, references: Sequence[Any]) -> tuple[list[list[RolloutText]], list[int]]:
        """The texts of all data-parallel ranks by step, and the number of rollouts of each step."""
        ray = importlib.import_module("ray")
        by_rank = [ray.get(reference.inner) for reference in references]
        if len(by_rank) != self.train_parallel_config["dp_size"]:
            raise DataError(
                f"{len(by_rank)} parts of a rollout for {self.train_parallel_config['dp_size']} data-parallel ranks; "
                "give one for each"
            )
        sizes = list(by_rank[0]["global_batch_sizes"])
        steps: list[list[RolloutText]] = [[] for _ in sizes]
        for rank, rollout in enumerate(by_rank):
            micro_batches: Iterator[list[int]] = iter(rollout["micro_batch_indices"])
            for step, count in zip(steps, rollout["num_microbatches"], strict=True):
                step += [_sample(rollout, rank, text) for text in chain(*islice(micro_batches, count))]
        return steps, sizes

    def _score(self, samples: list[RolloutText], external_data: Any) -> None:
        """Compute the log-probabilities that advantages and the loss read."""
        args = self.args
        texts = [sample.scored for sample in samples]
        if args.loss_type != "policy_loss":
            return
        policies: dict[str, Any] = {"ref_log_probs": self._reference, "teacher_log_probs": self._teacher}
        if not args.use_rollout_logprobs:
            policies["log_probs"] = self._trainer
        for name, policy in policies.items():
            if policy is not None:
                _set(samples, name, policy.log_probs(texts, temperature=args.rollout_temperature).log_probs)
        if args.advantage_estimator == "ppo":
            groups = self._trainer.run.groups
            values = (external_data or {}).get("values")
            rows = None if values is None or groups.index("tp") or groups.index("cp") else [v.tolist() for v in values]
            by_rank = gather_by_data_rank(rows, groups.index("dp"), self._world.device)
            if sum(map(len, by_rank)) != len(samples):
                raise DataError(
                    f"{sum(map(len, by_rank))} rows of values in external_data for {len(samples)} texts; pass those "
                    "that the critic's train() has returned on each rank"
                )
            rows_of_texts = [by_rank[rank][text] for rank, text in map(_POSITION, samples)]
            _set(samples, "values", [torch.tensor(row, dtype=torch.float64) for row in rows_of_texts])

    def _take_step(self, step: list[RolloutText], size: int) -> dict[str, float]:
        """Take an optimizer step on texts of ``size`` rollouts; returns its metrics."""
        args = self.args
        total = sum(max(float(sample.mask.sum()), 1.0) for sample in step)
        weights = [1.0 / (total if args.calculate_per_token_loss else max(s.mask_sum, 1.0) * size) for s in step]
        objective, names, temperature = objective_of(args, self.role)
        trajectories = [sample.learned(weight, names) for sample, weight in zip(step, weights, strict=True)]
        result = self._trainer.train_on(trajectories, objective, temperature=temperature)
        metrics = {"loss": result.loss, "grad_norm": float(result.grad_norm), "lr-pg_0": result.learning_rate}
        return metrics | {name.replace(" ", "_"): result.breakdown[name] for name in objective.metric_names}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._trainer.is_first_rank:
            prefix = "train/critic-" if self.role == "critic" else "train/"
            named = {prefix + name: value for name, value in metrics.items()}
            self._logging.log(self.args, {**named, "train/step": step}, step_key="train/step")

    # Weights.

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save a checkpoint in the folder ``save``, and weights for ``transformers`` in ``save_hf``."""
        if self.args.debug_rollout_only:
            return
        if self.args.offload_train:
            self.wake_up()
        self._trainer.stored[STATE] = {"rollout_id": rollout_id}
        self._trainer.save()
        if self.args.save_hf is not None and self.role == "actor":
            self._write(Path(self.args.save_hf.format(rollout_id=rollout_id)))
        if self.args.offload_train:
            self.sleep()

    def update_weights(self) -> None:
        """Give the present weights to slime's engines: in a folder, which slime loads, or by messages from rank 0."""
        args = self.args
        if args.debug_train_only or args.debug_rollout_only:
            return
        if args.offload_train:
            self.wake_up()
        self._version += 1
        if args.update_weight_transport == "disk":
            self._write(Path(args.update_weight_disk_dir) / f"weight_v{self._version:06d}")
        else:
            self._send()
        if args.offload_train:
            self.sleep()

    def _write(self, folder: Path) -> None:
        save_weights(self._trainer.run, folder, Path(self.args.hf_checkpoint))

    def _send(self) -> None:
        """Send the weights to all engines; rank 0 alone speaks to them."""
        ray = importlib.import_module("ray")
        sender = importlib.import_module(SENDER)
        is_first = self._trainer.is_first_rank
        engines: Sequence[Any] = []
        if is_first:
            manager = self.rollout_manager
            if self.args.use_fault_tolerance:
                ray.get(manager.recover_updatable_engines.remote())
            engines, _, new, sizes, *_ = ray.get(manager.get_updatable_engines_and_lock.remote())
            if new:
                if self._group is not None:
                    sender.disconnect_rollout_engines_from_distributed(self.args, GROUP, self._group, engines)
                self._group = sender.connect_rollout_engines_from_distributed(
                    self.args, GROUP, engines, engine_gpu_counts=sizes
                )
                ray.get(manager.clear_updatable_num_new_engines.remote())
            for method in ("pause_generation", "flush_cache"):
                ray.get([getattr(engine, method).remote() for engine in engines])
        for bucket in in_buckets(self._trainer.weights(), self.args.update_weight_buffer_size):
            if engines:
                ray.get(
                    sender.update_weights_from_distributed(GROUP, self._group, self._version, engines, list(bucket))
                )
        if is_first:
            ray.get([engine.continue_generation.remote() for engine in engines])


def slime_trainer(**flags: Any) -> type:
    """The class for slime's ``actor_cls``; ``flags``: settings of ``megatron-train`` in addition to its arguments."""
    base = importlib.import_module("slime.ray.train_actor").TrainRayActor
    return type("MegatronNativeTrainer", (SlimeTrainer, base), {"flags": flags, "__doc__": SlimeTrainer.__doc__})


def objective_of(args: Any, role: str) -> tuple[TokenObjective, dict[str, str], float]:
    """slime's loss: an objective, the numbers of a ``RolloutText`` that it reads, and its temperature.

    Each token has a ``weight`` by which sums are slime's means. Errors: ``ConfigError`` for a loss of the user.
    """
    if role == "critic":
        critic_loss = partial(value_loss, clip=args.value_clip)
        names = {"returns": "returns", "old_values": "values"}
        # value_loss has the factor 1/2 of the PPO paper, slime's has not.
        return _weighted(critic_loss, ("clip fraction",), factor=2.0, reads="values"), names, 1.0
    if args.loss_type == "sft_loss":
        return _weighted(lambda log_probs, batch: -log_probs, ()), {}, args.rollout_temperature
    if args.loss_type != "policy_loss":
        raise ConfigError(f"loss_type={args.loss_type}: this trainer of slime has policy_loss and sft_loss; give one")
    limits = {"clip": args.eps_clip, "clip_high": args.eps_clip_high}
    by_estimator = {"gspo": partial(sequence_clipped_loss, **limits), "cispo": partial(weight_clipped_loss, **limits)}
    loss: TokenLoss = partial(clipped_loss, **limits, dual_clip=args.eps_clip_c)
    loss = by_estimator.get(args.advantage_estimator, loss)
    names = {"advantages": "advantages", "old_log_probs": "log_probs"}
    metrics = ["clip fraction"]
    if args.use_rollout_logprobs:
        names["old_log_probs"] = "rollout_log_probs"
    if args.use_tis:
        names["sampler_log_probs"] = "rollout_log_probs"
        loss = with_sampler_correction(loss, args.tis_clip, floor=args.tis_clip_low)
    if args.use_kl_loss:
        names["reference_log_probs"] = "ref_log_probs"
        metrics.append("kl")
        loss = with_kl(loss, args.kl_loss_coef, args.kl_loss_type, weighted=args.use_unbiased_kl)
    return _weighted(loss, tuple(metrics), args.entropy_coef), names, args.rollout_temperature


def _weighted(
    loss: TokenLoss, metrics: tuple[str, ...], entropy_coefficient: float = 0.0, *, factor: float = 1.0, **settings: Any
) -> TokenObjective:
    """The sum of factor * weight * (loss - entropy_coefficient * entropy) over tokens."""

    def weighted(numbers: Tensor, batch: TokenBatch) -> Tensor:
        losses = loss(numbers, batch)
        if batch.entropy is not None:
            losses = losses - entropy_coefficient * batch.entropy
        return factor * batch["weight"] * losses

    reports = entropy_coefficient != 0.0
    return TokenObjective(loss=weighted, mean_over="sum", metrics=metrics, reports_entropy=reports, **settings)


def set_advantages(args: Any, samples: Sequence[RolloutText]) -> None:
    """Set ``advantages`` and ``returns`` of each token as slime's ``compute_advantages_and_returns`` does."""
    for sample in samples:
        old = sample.numbers.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
        penalty = torch.zeros_like(sample.mask)
        if args.kl_coef != 0 and old is not None:
            penalty = -args.kl_coef * kl_estimate(old, sample.numbers["ref_log_probs"], args.kl_loss_type)
        advantages, returns = _advantages_of(args, sample, penalty)
        if args.use_opd and old is not None:
            advantages = advantages - args.opd_kl_coef * (old - sample.numbers["teacher_log_probs"])
        sample.numbers |= {"advantages": advantages, "returns": returns}
    if args.normalize_advantages:
        learned = torch.cat([sample.numbers["advantages"][sample.mask > 0] for sample in samples])
        scale = (learned.var(correction=min(len(learned) - 1, 1)) + 1e-8).rsqrt()
        for sample in samples:
            sample.numbers["advantages"] = (sample.numbers["advantages"] - learned.mean()) * scale


def _advantages_of(args: Any, sample: RolloutText, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a text; ``penalty`` ``[r]``: the divergence from the reference as a reward."""
    estimator = args.advantage_estimator
    if estimator in ("grpo", "gspo", "cispo"):
        of_group = torch.full_like(penalty, sample.reward)
        return of_group, of_group
    if estimator == "reinforce_plus_plus_baseline":
        return penalty + sample.reward, penalty + sample.reward
    if estimator == "ppo":
        rewards = penalty.clone()
        rewards[-1] += sample.reward
        values, smoothing = sample.numbers["values"].tolist(), args.lambd
    elif estimator == "reinforce_plus_plus":
        rewards = penalty * sample.mask
        rewards[sample.mask.nonzero()[-1]] += sample.reward
        values, smoothing = [0.0] * len(rewards), 1.0
    else:
        raise ConfigError(f"advantage_estimator={estimator} is not one of slime's; see its --advantage-estimator")
    rows = generalized_advantages(rewards.tolist(), values, discount=args.gamma, smoothing=smoothing)
    advantages, returns = map(penalty.new_tensor, rows)
    return advantages, returns


def _sample(rollout: Mapping[str, Any], rank: int, text: int) -> RolloutText:
    """A text of the part that slime sends to a data-parallel rank."""
    mask = torch.as_tensor(rollout["loss_masks"][text], dtype=torch.float64)
    tokens = torch.as_tensor(rollout["tokens"][text]).tolist()
    sample = RolloutText(
        tokens, mask, float(rollout["rewards"][text]), float(rollout["rollout_mask_sums"][text]), (rank, text)
    )
    for name in ("rollout_log_probs", "teacher_log_probs"):
        if name in rollout:
            sample.numbers[name] = torch.as_tensor(rollout[name][text], dtype=torch.float64)
    return sample


def _set(samples: Sequence[RolloutText], name: str, rows: Sequence[Tensor]) -> None:
    """Set a number of each token of the responses."""
    for sample, row in zip(samples, rows, strict=True):
        sample.numbers[name] = row.detach().double().cpu()
