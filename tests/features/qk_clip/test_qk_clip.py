"""QK-clip: the recorded logits are those of the formula, and after an update no head exceeds the threshold."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.features.qk_clip.clip import QKClip
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.transformer.core_attention import CoreAttention
from megatron_core.verify.gpt import RaggedDataset
from tests.parity.latent_rows import LATENT
from tests.runs import tiny_config, tiny_run

THRESHOLD = 0.4
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
GROUPS = {"group_query_attention": True, "num_query_groups": 2, "position_embedding_type": "rope"}
MODELS = {
    "heads": {},
    "groups, packed": GROUPS | PACKED,
    "window": {"window_size": (3, 0)},
    "latents": {name: value for name, value in LATENT.items() if name not in ("num_layers", "global_batch_size")},
}


class _SameBatch:
    """The samples of the first batch in every step."""

    def __init__(self, own: RaggedDataset, size: int) -> None:
        self.own, self.size, self.sequence_length = own, size, own.sequence_length

    def __getitem__(self, index: int):
        return self.own[index % self.size]


def _run(name: str, **settings: object) -> Run:
    common = {"qk_clip": True, "qk_clip_threshold": THRESHOLD, "fp64": True, "init_method_std": 0.2, "lr": 1e-30}
    run = tiny_run(**common | {"global_batch_size": 4} | MODELS[name] | settings)
    run.train_loader = run.loader(_SameBatch(RaggedDataset(61, 16), 4))
    return run


def _clip(run: Run) -> QKClip:
    (part,) = (part for part in run.parts if isinstance(part, QKClip))
    return part


def _largest(run: Run) -> torch.Tensor:
    return torch.stack([recorder.largest for recorder in _clip(run).recorders]).clone()


@pytest.mark.parametrize("name", MODELS)
def test_recorded_logits_are_those_of_the_formula(name: str) -> None:
    run, found = _run(name), {}

    def scores(core: CoreAttention, arguments: tuple) -> None:
        query, key, _, context, *_ = arguments
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        logits = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(query.shape[-1])
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        if core.window is not None:
            seen = seen.triu(1 - core.window)
        hidden = ~seen.expand(len(logits), 1, -1, -1)
        if context.documents is not None:
            hidden = hidden | context.documents.masked
        own = logits.masked_fill(hidden, -math.inf).amax((0, 2, 3)).detach()
        found[core] = torch.maximum(found.get(core, own), own)

    for module in run.stages[0].modules():
        if isinstance(module, CoreAttention):
            module.register_forward_pre_hook(scores)
    train_step(run)
    torch.testing.assert_close(_largest(run), torch.stack(list(found.values())), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_logits_after_an_update_are_below_the_threshold(name: str, alpha: float) -> None:
    """The first layer, whose inputs do not change; with one key head for each query head exactly S and t."""
    run = _run(name, qk_clip_alpha=alpha)
    metrics = train_step(run).breakdown
    before = _largest(run)
    assert metrics["max attention logit"] == before.max().item()
    assert (before[0] > THRESHOLD).any()
    train_step(run)
    after = _largest(run)[0]
    groups = run.config.model.query_groups if "groups" in name else len(after)
    factor = (THRESHOLD / before[0].view(groups, -1).amax(1)).clamp_max(1.0).repeat_interleave(len(after) // groups)
    torch.testing.assert_close(after, before[0] * factor, rtol=1e-9, atol=0.0)


def test_queries_and_keys_share_the_factor_and_values_keep_theirs() -> None:
    """With g = min(1, t / S): W_q g^alpha, W_k g^(1 - alpha); logits alone would not show an exchanged alpha."""
    run, other = _run("heads", qk_clip_alpha=0.25), _run("heads", qk_clip=False, qk_clip_threshold=100.0)
    train_step(run)
    train_step(other)
    weights = [dict(each.stages[0].named_parameters()) for each in (run, other)]
    changed = {name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])}
    assert {name.rpartition(".")[0] for name in changed} == {
        f"decoder.layers.{number}.self_attention.linear_qkv" for number in range(2)
    }
    mine, theirs = (w["decoder.layers.0.self_attention.linear_qkv.weight"].view(4, 3, 8, -1) for w in weights)
    factor = (THRESHOLD / _largest(run)[0]).clamp_max(1.0)[:, None, None]
    torch.testing.assert_close(mine[:, 0], theirs[:, 0] * factor**0.25, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(mine[:, 1], theirs[:, 1] * factor**0.75, rtol=1e-12, atol=0.0)
    assert torch.equal(mine[:, 2], theirs[:, 2]) and (factor < 1.0).any()


def test_logits_are_recorded_without_clipping() -> None:
    run, clipped = _run("heads", qk_clip=False, qk_clip_threshold=100.0, log_max_attention_logit=True), _run("heads")
    assert train_step(run).breakdown["max attention logit"] == train_step(clipped).breakdown["max attention logit"]
    weight = "decoder.layers.0.self_attention.linear_qkv.weight"
    weights = (dict(each.stages[0].named_parameters())[weight] for each in (run, _run("heads", qk_clip=False)))
    torch.testing.assert_close(*weights, rtol=0.0, atol=1e-20)  # the learning rate is 1e-30


def test_no_record_of_compiled_layers() -> None:
    with pytest.raises(ConfigError, match="compile=True cannot be used with log_max_attention_logit=True"):
        check(tiny_config(log_max_attention_logit=True, compile=True), 1)


@pytest.mark.parametrize(
    "settings", [{"qk_layernorm": True}, {"lora_rank": 2}, {"compile": True}, {"optimizer_cpu_offload": True}]
)
def test_contradictions(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cannot be used with qk_clip=True"):
        check(tiny_config(qk_clip=True, **settings), 1)
