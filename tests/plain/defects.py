"""Defects that change every layout alike, so that a comparison of layouts cannot find them."""

from __future__ import annotations

from typing import NamedTuple


class CommonDefect(NamedTuple):
    """A change of one function of the engine, and the row of the plain model that must differ."""

    target: str
    """The function, ``module:Qualname`` inside the package."""
    old: str
    """A fragment that its source contains once."""
    new: str
    row: str


BALANCE = "transformer.moe.balance"
DEFECTS: dict[str, CommonDefect] = {
    "global balancing loss without the factor E / k": CommonDefect(
        f"{BALANCE}:balancing_loss",
        "experts / k * total(terms / tokens)",
        "total(terms / tokens)",
        "balance of all tokens",
    ),
    "loss of a micro-batch not multiplied by its sequences": CommonDefect(
        f"{BALANCE}:balancing_loss", "else logits.shape[1]", "else 1", "balance of micro-batches"
    ),
    "scores of balancing losses not normalized": CommonDefect(
        f"{BALANCE}:balancing_loss",
        "log_scores(logits, config).softmax(-1)",
        "log_scores(logits, config).exp()",
        "sigmoid",
    ),
    "router's z-loss without the square": CommonDefect(
        f"{BALANCE}:z_loss", "logsumexp(-1).square()", "logsumexp(-1)", "three balancing losses"
    ),
    "experts not limited to groups": CommonDefect(
        "transformer.moe.choice:choose_experts",
        "ranking = grouped.masked_fill(~eligible[..., None], -inf).flatten(-2)",
        "pass",
        "groups of experts",
    ),
    "groups scored by their best expert alone": CommonDefect(
        "transformer.moe.choice:choose_experts",
        "grouped.topk(counted)",
        "grouped.topk(1)",
        "groups by two scores, biases",
    ),
    "biases of experts updated in the wrong direction": CommonDefect(
        "transformer.moe.router:update_expert_biases",
        "(load.mean() - load)",
        "(load - load.mean())",
        "groups by two scores, biases",
    ),
    "capacity rounded down": CommonDefect(
        "transformer.moe.router:TopKRouter._capacity", "math.ceil(", "math.floor(", "capacity"
    ),
    "jitter of twice its width": CommonDefect(
        "transformer.moe.router:TopKRouter._jittered",
        "2 * drawn.to(x.dtype) - 1",
        "4 * drawn.to(x.dtype) - 2",
        "jitter",
    ),
    "no sigmoid of the gate of shared experts": CommonDefect(
        "transformer.moe.layer:SharedExperts.forward",
        "self.gate_product(hidden, self.gate_weight, None).sigmoid()",
        "self.gate_product(hidden, self.gate_weight, None)",
        "shared experts with a gate",
    ),
    "epsilon of norms ten times too large": CommonDefect(
        "transformer.norm:Norm.__init__", "config.norm_epsilon if", "10 * config.norm_epsilon if", "llama"
    ),
    "norm weights not increased by one": CommonDefect(
        "transformer.norm:Norm.normalised", "factor = 1 + factor", "factor = 0.5 + factor", "norms plus one"
    ),
    "GELU approximated without its flag": CommonDefect(
        "transformer.mlp:activation_kind", 'else "gelu"', 'else "gelu_tanh"', "adam"
    ),
    "keys and values exchanged": CommonDefect(
        "transformer.attention:SelfAttention._query_key_value",
        "query, gate, key, value = mixed",
        "query, gate, value, key = mixed",
        "groups",
    ),
    "window without the token itself": CommonDefect(
        "transformer.core_attention:CoreAttention.__init__", "window_size[0] + 1", "window_size[0]", "windows"
    ),
    "logits bounded by 1": CommonDefect(
        "models.gpt.model:GPTModel._capped", "cap * torch.tanh", "1.0 * torch.tanh", "bounded scores and logits"
    ),
    "positions turn the other way": CommonDefect(
        "transformer.rotary:rotary_table", "angles.sin()", "-angles.sin()", "adjacent channels rotated"
    ),
    "YaRN's factor not divided": CommonDefect(
        "transformer.rotary:yarn_magnitude", " / yarn_mscale(factor, config.mscale_all_dim)", "", "yarn"
    ),
    "YaRN's factor on scores not squared": CommonDefect(
        "transformer.latent_attention:query_factor",
        "config.mscale_all_dim) ** 2",
        "config.mscale_all_dim)",
        "latent attention without norms, yarn",
    ),
    "slopes of linear biases shifted by a head": CommonDefect(
        "transformer.linear_bias:bias_slopes", "-8.0 * (number + 1.0)", "-8.0 * number", "linear biases"
    ),
    "muP without the base model's heads": CommonDefect(
        "config.model:ModelConfig.attention_scale", "(self.mup_base_head_dim or 1.0) ** 0.5", "1.0", "mup"
    ),
    "z-loss of masked tokens": CommonDefect(
        "transformer.z_loss:with_z_loss", "log_z.square() * loss_mask.transpose(0, 1)", "log_z.square()", "z-loss"
    ),
    "later tokens shifted by one place less": CommonDefect(
        "parallel.micro_batch:LaterTokens.of", "range(1, depths + 1)", "range(depths)", "later tokens"
    ),
    "losses of later tokens added, not averaged": CommonDefect(
        "features.multi_token.block:MultiTokenPredictionBlock.add_losses", " / len(names)", "", "later tokens"
    ),
    "embedding and hidden state exchanged": CommonDefect(
        "features.multi_token.block:MultiTokenPredictionLayer._forward",
        "[self.enorm(embedded), self.hnorm(hidden)]",
        "[self.hnorm(hidden), self.enorm(embedded)]",
        "later tokens",
    ),
    "later tokens of other documents": CommonDefect(
        "parallel.micro_batch:LaterTokens.of", "_ahead(masks, ahead) * same", "_ahead(masks, ahead)", "documents"
    ),
    "bias correction of the next step": CommonDefect(
        "optimizer.algorithms:AdamW.update", "step=rates.step if", "step=rates.step + 1 if", "adam"
    ),
    "Lion's factors exchanged": CommonDefect(
        "optimizer.algorithms:Lion.update",
        "torch.lerp(grad, momentum, beta1)",
        "torch.lerp(grad, momentum, beta2)",
        "lion",
    ),
    "weight decay enters the momentum of Lion": CommonDefect(
        "optimizer.algorithms:Lion.update", "1.0 - rates.lr * rates.weight_decay", "1.0 - rates.weight_decay", "lion"
    ),
    "LAMB's ratio of squares": CommonDefect(
        "optimizer.lamb:LAMB.coefficients", "self.groups).sqrt()", "self.groups)", "lamb"
    ),
    "Muon's scale of the shorter side": CommonDefect(
        "features.matrix_optimizers.muon:Muon._scaled", "max(rows, columns)", "min(rows, columns)", "muon"
    ),
    "NorMuon averages over the longer side": CommonDefect(
        "features.matrix_optimizers.muon:_averaged", ">=", "<", "normuon"
    ),
    "weight decay of biases and norms": CommonDefect(
        "data_parallel.settings:BucketKind.of", "decay=matrix or", "decay=True or", "adam"
    ),
    "gradients clipped to half of the limit": CommonDefect(
        "optimizer.clip:clip_factor", "limit / (norm", "0.5 * limit / (norm", "gpt2"
    ),
    "quarter of a cosine": CommonDefect(
        "optimizer.lr_schedule:_shape",
        "0.5 * (math.cos(math.pi * done) + 1.0)",
        "math.cos(0.5 * math.pi * done)",
        "cosine decay",
    ),
    "average with exchanged weights": CommonDefect(
        "optimizer.sharded:Optimizer._update_averages",
        "1.0 - self.config.ema_decay",
        "self.config.ema_decay",
        "average",
    ),
    "dropout of the wrong places": CommonDefect(
        "tensor_parallel.random:KeyedDropout.__init__", 'f"dropout:{name}"', '"dropout"', "dropout"
    ),
}

OF_LOSS_SCALE: dict[str, CommonDefect] = {
    "losses of layers without the loss scale": CommonDefect(
        "transformer.auxiliary_loss:MicroBatchAuxiliaryLosses.add",
        "coefficient * self.step.loss_scale / denominator",
        "coefficient / denominator",
        "three balancing losses",
    ),
    "clipping of gradients with the loss scale": CommonDefect(
        "optimizer.sharded:Optimizer.gradient_norm", " / self.loss_scale.scale", "", "z-loss"
    ),
}
"""Defects that only a loss scale shows."""

OF_GROUPS: dict[str, CommonDefect] = {
    "offsets of groups from the 48th rank on": CommonDefect(
        "parallel.grid:Grid._offsets",
        "sorted(map(sum, product(*steps)))",
        "sorted(offset + (offset >= 48) for offset in map(sum, product(*steps)))",
        "512 ranks",
    ),
    "groups of ranks from 48 on": CommonDefect(
        "parallel.grid:Grid.group_of", "[first + offset for", "[first + offset + (rank >= 48) for", "64 ranks"
    ),
}
"""Defects of large layouts; the row is one of ``test_groups``."""
