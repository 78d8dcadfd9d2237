"""The differences of a training from that of Megatron-LM with the same flags."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.cli import settings_from_folder
from megatron_core.config.flags import to_flag


@dataclass(frozen=True)
class TrainingDifference:
    """A difference that changes the weights after a step."""

    name: str
    text: str
    """Megatron-LM's behaviour, and that of the run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that choose Megatron-LM's behaviour; empty if it does not exist here, or depends on other values."""
    unless: str = ""
    """A flag of Megatron-LM that removes the difference there and has no effect here."""
    of_default: str = ""
    """A setting of which only the default differs: a launch that gives it has no difference."""

    def __str__(self) -> str:
        flags = [
            to_flag(name if value is not False else f"no_{name}") + ("" if isinstance(value, bool) else f" {value}")
            for name, value in self.settings.items()
        ]
        return f"{self.name}: {self.text}" + (f" ({' '.join(flags)} chooses it)" if flags else "")


def settings_of_megatron(config: RunConfig, ignored: Collection[str]) -> dict[str, Any]:
    """The settings of ``--as-megatron``; ``ignored``: the names of flags that have no effect here."""
    chosen: dict[str, Any] = {}
    for difference in training_differences(config):
        if difference.unless not in ignored:
            chosen |= difference.settings
    return chosen


def training_differences(config: RunConfig) -> list[TrainingDifference]:
    """All differences of a training with these settings, those that ``--as-megatron`` removes first."""
    listed = [*_of_model(config), *_of_optimizer(config), *_of_data(config), *_of_experts(config), *_of_numbers(config)]
    return sorted(listed, key=lambda difference: not difference.settings)


def _of_model(config: RunConfig) -> Iterator[TrainingDifference]:
    model = config.model
    is_gelu = not any((model.swiglu, model.gated_linear_unit, model.squared_relu, model.relu, model.xielu))
    # The settings of a folder have the GELU with which its weights were trained.
    if is_gelu and not model.openai_gelu and model.add_bias_linear and not settings_from_folder(config):
        yield TrainingDifference(
            "GELU",
            "exact; Megatron-LM computes its tanh approximation in layers with biases, unless --no-bias-gelu-fusion is "
            "given",
            {"openai_gelu": True},
            unless="no_bias_gelu_fusion",
        )
    if model.experimental_attention_variant == "dsa" and model.attention_dropout:
        yield TrainingDifference(
            "dropout of sparse attention",
            "refused; Megatron-LM ignores --attention-dropout",
            {"attention_dropout": 0.0},
        )
    vocabulary = config.data.vocab_size
    multiple = model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    if vocabulary is None or vocabulary % multiple:
        padded = "the padded size" if vocabulary is None else f"--vocab-size {-(-vocabulary // multiple) * multiple}"
        yield TrainingDifference(
            "padding of the vocabulary",
            f"no part of the softmax; Megatron-LM's softmax includes the rows that fill it up to a multiple of "
            f"{multiple}; {padded} includes them here, too",
        )
    if (
        config.optional("mtp_num_layers")
        and config.optional("num_experts")
        and not config.optional("mtp_zero_last_input")
    ):
        yield TrainingDifference(
            "last input of multi-token prediction",
            "the last label of the sequence; in Megatron-LM it is token 0, on which experts and their losses depend",
            {"mtp_zero_last_input": True},
        )


def _of_optimizer(config: RunConfig) -> Iterator[TrainingDifference]:
    optimizer = config.optimizer
    is_constant = optimizer.lr_decay_style == "constant" and not optimizer.has_warmup
    if not optimizer.lr_one_step_later and not (is_constant and optimizer.weight_decay_incr_style == "constant"):
        yield TrainingDifference(
            "learning rate",
            "that of the step; Megatron-LM applies each rate one step later",
            {"lr_one_step_later": True},
        )
    if (
        optimizer.lr_decay_style == "inverse-square-root"
        and not optimizer.has_warmup
        and not config.schedules_by_samples
    ):
        yield TrainingDifference(
            "inverse square root without warm-up",
            "--lr divided by the root of the step; Megatron-LM divides by the root of the number of samples, as here "
            "with --train-samples",
        )
    if config.optional("step_batch_size_schedule") and not is_constant and not config.schedules_by_samples:
        yield TrainingDifference(
            "learning rate of a batch that grows",
            "follows the steps; Megatron-LM's follows the samples, and its decay ends after --lr-decay-iters times the "
            "micro-batches of all ranks, thus earlier. With --train-samples both are equal",
        )
    has_matrices = any(row.scalar_optimizer for row in optimizer.kinds)
    is_learned = config.model.position_embedding_type == "learned_absolute"
    if is_learned and not config.model.positions_as_matrices and (has_matrices or optimizer.decoupled_lr is not None):
        yield TrainingDifference(
            "learned positions",
            "embeddings for --decoupled-lr and optimizers of matrices; hidden matrices in Megatron-LM",
            {"positions_as_matrices": True},
        )
    if has_matrices:
        yield TrainingDifference(
            f"--optimizer {optimizer.optimizer}",
            "updates whole matrices in every layout; Megatron-LM may have other factors (docs/from_megatron.md)",
        )
    if config.optional("qk_clip") and (config.model.has_qkv_bias or config.optional("mtp_num_layers")):
        yield TrainingDifference(
            "--qk-clip",
            "scales biases of queries and keys, and layers of multi-token prediction, too; Megatron-LM scales neither",
        )
    if config.optional("rampup_batch_size") is not None:
        yield TrainingDifference(
            "--rampup-batch-size", "raises the batch size; Megatron Core 0.19 and later ignores it"
        )


def _of_data(config: RunConfig) -> Iterator[TrainingDifference]:
    data = config.data
    is_sft = bool(config.optional("sft"))
    has_own_loss = bool(config.optional("dpo") or config.optional("kd_teacher"))
    is_ordered = data.dataloader_type == "single" and not data.phase_hooks and not is_sft and not has_own_loss
    if data.data_order == "keyed" and data.dataloader_type != "external":
        yield TrainingDifference(
            "data order",
            "a permutation of its own by --seed" + ("" if is_ordered else ", which this kind of data always has"),
            {"data_order": "megatron"} if is_ordered else {},
        )
    if (data.eod_mask_loss or is_sft) and config.optional("calculate_per_token_loss") and not has_own_loss:
        yield TrainingDifference(
            "mean of the loss",
            "over the tokens of the global batch; Megatron-LM averages the means of micro-batches, which have other "
            "numbers of unmasked tokens, unless --calculate-per-token-loss is given",
            {"calculate_per_token_loss": False},
        )
    if config.optional("fim_data"):
        yield TrainingDifference(
            "--fim-data",
            "draws documents and their cuts by --seed and the sample; Megatron-LM draws them in the order in which a "
            "worker reads, and tokens that fill a shortened text have a loss there, and none here",
        )
    yield from _of_documents(config, masks=data.eod_mask_loss or is_sft)


def _of_documents(config: RunConfig, *, masks: bool) -> Iterator[TrainingDifference]:
    """Differences of sequences with several documents, which have no setting; ``masks``: some tokens have no loss."""
    data = config.data
    predicts_later = bool(config.optional("mtp_num_layers"))
    if data.reset_attention_mask:
        yield TrainingDifference(
            "--reset-attention-mask",
            "attention within documents; in Megatron-LM also across them with Transformer Engine, its default, which "
            "ignores the mask, as here without the flag",
        )
    if data.reset_position_ids and config.model.position_embedding_type == "rope" and not data.reset_attention_mask:
        yield TrainingDifference(
            "--reset-position-ids",
            "rotary positions restart in each document; in Megatron-LM they do not, as here without the flag",
        )
    if predicts_later and data.reset_attention_mask:
        yield TrainingDifference(
            "multi-token prediction across documents", "has no loss; in Megatron-LM it counts as within a document"
        )
    if predicts_later and masks:
        yield TrainingDifference(
            "mean of the losses of multi-token prediction",
            "over the tokens of the global batch; Megatron-LM averages the means of micro-batches",
        )
    if masks and config.optional("num_experts"):
        yield TrainingDifference(
            "experts of tokens without loss",
            "not counted by balancing losses, z-losses and biases of experts; counted in Megatron-LM",
        )


def _of_experts(config: RunConfig) -> Iterator[TrainingDifference]:
    if not config.optional("num_experts"):
        return
    balance, coefficient = (config.value(f"moe_{name}") for name in ("router_load_balancing_type", "aux_loss_coeff"))
    capacity = config.value("moe_expert_capacity_factor")
    if balance == "seq_aux_loss" and coefficient:
        yield TrainingDifference(
            "balancing loss",
            "of each sequence; Megatron-LM's default is that of a micro-batch, unless "
            "--moe-router-load-balancing-type is given",
            {"moe_router_load_balancing_type": "aux_loss"},
            of_default="moe_router_load_balancing_type",
        )
    if capacity is not None and config.value("moe_capacity_per") == "sequence":
        yield TrainingDifference(
            "capacity of experts",
            "counts the tokens of a sequence; Megatron-LM counts the tokens of a micro-batch that a rank has",
            {"moe_capacity_per": "micro_batch"},
        )
    if balance == "global_aux_loss" and coefficient:
        yield TrainingDifference(
            "global_aux_loss", "counts are divided by all their tokens; there by those of a micro-batch"
        )
    if config.value("moe_router_force_load_balancing"):
        yield TrainingDifference(
            "--moe-router-force-load-balancing",
            "chooses experts in turn, with the router's probabilities; Megatron-LM draws its logits",
        )
    split = config.parallel.tensor_model_parallel_size > 1 or config.parallel.context_parallel_size > 1
    if split and (capacity is not None or balance == "sinkhorn"):
        yield TrainingDifference("experts in a divided sequence", "all tokens of a micro-batch; there those of a rank")
    if config.training.compute_dtype != "float32" and config.value("moe_router_dtype") == "fp32":
        yield TrainingDifference(
            "router",
            "in float32; there in the precision of the activations unless --moe-router-dtype is given",
            of_default="moe_router_dtype",
        )


def _of_numbers(config: RunConfig) -> Iterator[TrainingDifference]:
    """Random numbers and rounding, which have no setting."""
    model = config.model
    checkpoint = config.checkpoint
    # The folder of --save is empty at the first start of a training that resumes from it.
    starts = checkpoint.load in (None, checkpoint.save) and not settings_from_folder(config)
    drawn = ["initial weights"] * starts + ["dropout masks"] * bool(model.hidden_dropout or model.attention_dropout)
    drawn += ["jitter"] * bool(config.optional("moe_input_jitter_eps"))
    if drawn:
        yield TrainingDifference(
            " and ".join(drawn), "functions of --seed and names; Megatron-LM draws them from the generators of ranks"
        )
    if config.training.fp16:
        yield TrainingDifference(
            "fp16",
            "main gradients are float32, so that a dynamic loss scale has other overflows; there they are float16 "
            "without --accumulate-allreduce-grads-in-fp32",
        )
    if config.training.bf16 and config.parallel.grad_reduce_in_bf16:
        yield TrainingDifference(
            "--grad-reduce-in-bf16",
            "sends gradients in bfloat16 and sums micro-batches in float32; Megatron-LM also sums them in bfloat16",
        )
    if config.optional("fp8_format") and config.optional("fp8_recipe") in ("delayed", "tensorwise"):
        yield TrainingDifference("FP8", "scales are those of whole tensors; there of the part on a rank")
    if config.optional("fp8_param_gather"):
        yield TrainingDifference("--fp8-param-gather", "rounds weights to 16 bits, then to 8; there once, to 8")
    if config.optional("fp8_format") and config.optional("num_experts") and config.value("fp8_recipe") != "delayed":
        deviations = ["each row has a scale (there each expert)"] * (config.value("fp8_recipe") == "tensorwise")
        deviations += ["weight gradients have the precision of activations (there FP8)"] * config.value("fp8_wgrad")
        if deviations:
            yield TrainingDifference("FP8 of experts", ", and ".join(deviations))
