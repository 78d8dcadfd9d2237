"""Defects that change every layout alike, so that a comparison of layouts cannot find them."""

from __future__ import annotations

from typing import NamedTuple

from tests.defects.patch import (
    Patch,
    argument,
    assigned,
    attribute,
    call,
    condition,
    constant,
    expression,
    returned,
    statement,
    without_statement,
)


class CommonDefect(NamedTuple):
    """A change of one function of the engine, and the row of the plain model that must differ."""

    target: str
    """The function, ``module:Qualname`` inside the package."""
    patch: Patch
    """The change of the function."""
    row: str


BALANCE = "features.experts.balance"
DEFECTS: dict[str, CommonDefect] = {
    "global balancing loss without the factor E / k": CommonDefect(
        f"{BALANCE}:balancing_loss",
        returned("total(terms / tokens)", number=1),
        "balance of all tokens",
    ),
    "loss of a micro-batch not multiplied by its sequences": CommonDefect(
        f"{BALANCE}:balancing_loss", expression("logits.shape[1]", "1"), "balance of micro-batches"
    ),
    "scores of balancing losses not normalized": CommonDefect(
        f"{BALANCE}:balancing_loss",
        call("softmax", "SELF.exp()"),
        "sigmoid",
    ),
    "scales of messages in 8 bits not rounded": CommonDefect(
        "features.mxfp8_messages.messages:pack_rows",
        argument("quantise", "power_of_two", "False"),
        "tokens in 8 bits",
    ),
    "gradients of outputs sent in their own precision": CommonDefect(
        "features.mxfp8_messages.messages:narrow_messages",
        without_statement("layer.dispatcher.send_gradients = narrow"),
        "tokens and gradients in 8 bits",
    ),
    "router's z-loss without the square": CommonDefect(
        f"{BALANCE}:z_loss", call("square", "SELF"), "three balancing losses"
    ),
    "experts not limited to groups": CommonDefect(
        "features.experts.choice:choose_experts",
        without_statement("ranking = grouped.masked_fill(~eligible[..., None], -inf).flatten(-2)"),
        "groups of experts",
    ),
    "groups scored by their best expert alone": CommonDefect(
        "features.experts.choice:choose_experts",
        argument("topk", 0, "1", number=2),
        "groups by two scores, biases",
    ),
    "biases of experts updated in the wrong direction": CommonDefect(
        "features.experts.part:update_expert_biases",
        attribute("sign", "(load - load.mean()).sign"),
        "groups by two scores, biases",
    ),
    "capacity rounded down": CommonDefect(
        "features.experts.router:TopKRouter._capacity", attribute("ceil", "math.floor"), "capacity"
    ),
    "jitter of twice its width": CommonDefect(
        "features.experts.router:TopKRouter._jittered",
        expression("2 * drawn.to(x.dtype) - 1", "4 * drawn.to(x.dtype) - 2"),
        "jitter",
    ),
    "no sigmoid of the gate of shared experts": CommonDefect(
        "features.experts.layer:SharedExperts.forward",
        call("sigmoid", "SELF"),
        "shared experts with a gate",
    ),
    "epsilon of norms ten times too large": CommonDefect(
        "transformer.norm:Norm.__init__", attribute("norm_epsilon", "10 * OLD"), "llama"
    ),
    "norm weights not increased by one": CommonDefect(
        "transformer.norm:Norm.normalised", constant(1, "0.5"), "norms plus one"
    ),
    "GELU approximated without its flag": CommonDefect(
        "transformer.mlp:activation_kind", constant("gelu", "'gelu_tanh'"), "adam"
    ),
    "keys and values exchanged": CommonDefect(
        "transformer.attention:SelfAttention._query_key_value",
        statement(
            "query, *gate, key, value = mixed.split([queries, *([gates] if gates else []), 1, 1], dim=-2)",
            "query, *gate, value, key = mixed.split([queries, *([gates] if gates else []), 1, 1], dim=-2)",
        ),
        "groups",
    ),
    "window without the token itself": CommonDefect(
        "transformer.core_attention:CoreAttention.__init__",
        assigned("self.window", "None if window_size is None or window_size[0] < 0 else window_size[0]"),
        "windows",
    ),
    "logits bounded by 1": CommonDefect(
        "models.gpt.model:VocabularyHead._capped",
        returned("logits if cap is None else 1.0 * torch.tanh(logits / cap)"),
        "bounded scores and logits",
    ),
    "positions turn the other way": CommonDefect(
        "transformer.rotary:rotary_table", call("sin", "-OLD"), "adjacent channels rotated"
    ),
    "YaRN's factor not divided": CommonDefect(
        "features.positions.settings:PositionConfig.yarn_magnitude",
        returned("self.yarn_mscale(self.mscale)", number=2),
        "yarn",
    ),
    "YaRN's factor on scores not squared": CommonDefect(
        "features.positions.settings:PositionConfig.rotary_score_factor",
        returned("self.yarn_mscale(self.mscale_all_dim)", number=1),
        "latent attention without norms, yarn",
    ),
    "slopes of linear biases shifted by a head": CommonDefect(
        "features.positions.linear_bias:bias_slopes", expression("number + 1.0", "number"), "linear biases"
    ),
    "muP without the base model's heads": CommonDefect(
        "features.mup.settings:MuPConfig.attention_scale",
        returned("1.0 / self.head_size ** self.mup_attn_scale_power", number=2),
        "mup",
    ),
    "z-loss of masked tokens": CommonDefect(
        "features.output_losses.head:with_z_loss",
        expression("log_z.square() * loss_mask.transpose(0, 1)", "log_z.square()"),
        "z-loss",
    ),
    "later tokens shifted by one place less": CommonDefect(
        "parallel.micro_batch:LaterTokens.of", call("range", "range(depths)"), "later tokens"
    ),
    "losses of later tokens added, not averaged": CommonDefect(
        "features.multi_token.block:MultiTokenPredictionBlock.add_losses",
        argument("add_auxiliary_loss", "coefficient", "self.model_config.mtp_loss_scaling_factor"),
        "later tokens",
    ),
    "embedding and hidden state exchanged": CommonDefect(
        "features.multi_token.block:MultiTokenPredictionLayer._forward",
        argument("cat", 0, "[self.hnorm(hidden), self.enorm(embedded)]"),
        "later tokens",
    ),
    "later tokens of other documents": CommonDefect(
        "parallel.micro_batch:LaterTokens.of",
        argument("zip", 1, "(_ahead(labels, ahead), _ahead(masks, ahead))"),
        "documents",
    ),
    "bias correction of the next step": CommonDefect(
        "optimizer.algorithms:AdamW.update", attribute("step", "OLD + 1"), "adam"
    ),
    "Lion's factors exchanged": CommonDefect(
        "features.sgd_and_lion.updates:Lion.update",
        argument("lerp", 2, "beta2"),
        "lion",
    ),
    "weight decay enters the momentum of Lion": CommonDefect(
        "features.sgd_and_lion.updates:Lion.update", argument("mul_", 0, "1.0 - rates.weight_decay", number=2), "lion"
    ),
    "LAMB's ratio of squares": CommonDefect("features.lamb.update:LAMB.coefficients", call("sqrt", "SELF"), "lamb"),
    "Muon's scale of the shorter side": CommonDefect(
        "features.matrix_optimizers.muon:Muon._scaled", call("max", "min(FIRST, SECOND)", number=1), "muon"
    ),
    "NorMuon averages over the longer side": CommonDefect(
        "features.matrix_optimizers.muon:_averaged", condition("matrix.shape[-2] < matrix.shape[-1]"), "normuon"
    ),
    "weight decay of biases and norms": CommonDefect(
        "data_parallel.settings:BucketKind.of",
        argument("cls", "decay", "True or getattr(parameter, 'decays', False)"),
        "adam",
    ),
    "gradients clipped to half of the limit": CommonDefect(
        "optimizer.clip:clip_factor", argument("min", 1, "0.5 * limit / (norm + 1e-06)"), "gpt2"
    ),
    "quarter of a cosine": CommonDefect(
        "optimizer.lr_schedule:_shape",
        returned("math.cos(0.5 * math.pi * done)", number=2),
        "cosine decay",
    ),
    "average with exchanged weights": CommonDefect(
        "optimizer.sharded:Optimizer._update_averages",
        argument("lerp_", 1, "self.config.ema_decay"),
        "average",
    ),
    "dropout of the wrong places": CommonDefect(
        "tensor_parallel.dropout:KeyedDropout.__init__", argument("name_seed", 1, "'dropout'"), "dropout"
    ),
}

OF_LOSS_SCALE: dict[str, CommonDefect] = {
    "losses of layers without the loss scale": CommonDefect(
        "transformer.auxiliary_loss:MicroBatchAuxiliaryLosses.add",
        expression("coefficient * self.step.loss_scale", "coefficient"),
        "three balancing losses",
    ),
    "clipping of gradients with the loss scale": CommonDefect(
        "optimizer.sharded:Optimizer.gradient_norm", returned("self.norm.compute()"), "z-loss"
    ),
}
"""Defects that only a loss scale shows."""

OF_GROUPS: dict[str, CommonDefect] = {
    "offsets of groups from the 48th rank on": CommonDefect(
        "parallel.grid:Grid._offsets",
        argument("sorted", 0, "(offset + (offset >= 48) for offset in OLD)"),
        "512 ranks",
    ),
    "groups of ranks from 48 on": CommonDefect(
        "parallel.grid:Grid.group_of", expression("first + offset", "OLD + (rank >= 48)"), "64 ranks"
    ),
}
"""Defects of large layouts; the row is one of ``test_groups``."""
