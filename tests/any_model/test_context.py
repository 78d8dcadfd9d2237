"""Context parallelism of transformers models and of a model of torch against the unmodified model in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import megatron_core
from megatron_core import LayerSpec, PipelineModule
from megatron_core.errors import MegatronError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.models import Result, difference
from tests.any_model.split_models import (
    MODELS,
    WITH_ROUTER_LOSS,
    TorchLayer,
    TorchModel,
    batches_of,
    model_of,
    terms_of,
    train_with_engine,
    train_with_torch,
)
from tests.defects.plant import planted

CP2: dict[str, Any] = {"context_parallel_size": 2}
CP4: dict[str, Any] = {"context_parallel_size": 4}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, {**CP2, "cp_comm_type": "all_gather"}),
    (4, {**CP4, "cp_comm_type": "p2p", "zero_stage": 1}),
    (4, {**CP4, "cp_comm_type": "a2a", "zero_stage": 2}),
    (4, {**CP2, "zero_stage": 3, "recompute_granularity": "full"}),
    (4, {**CP4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}),
    (8, {**CP2, "tensor_model_parallel_size": 2, "zero_stage": 3, "cp_comm_type": "a2a"}),
]
KINDS = ("plain", "packed", "padded")
CASES = [
    (name, kind, row)
    for number, name in enumerate(sorted(set(MODELS) - {"torch"}))
    for kind in KINDS
    for row in range(len(ROWS))
    if kind == "plain" or (number + row) % 3 == 0
]


@cache
def _reference(name: str, kind: str) -> Result:
    return train_with_torch(name, kind)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("name", "kind", "row"), CASES)
def test_equals_transformers(name: str, kind: str, row: int) -> None:
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, train_with_engine, name, kind, settings):
        assert difference(result, _reference(name, kind)) < 1e-9


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("qwen3-moe", "packed", {**CP2, "expert_model_parallel_size": 2, "zero_stage": 1}),
        ("gpt-oss", "plain", {**CP2, "expert_model_parallel_size": 4, "zero_stage": 3, "cp_comm_type": "all_gather"}),
    ],
)
def test_experts_on_the_ranks_of_sequences(name: str, kind: str, settings: dict[str, Any]) -> None:
    for result in run_ranks(4, train_with_engine, name, kind, settings):
        assert difference(result, _reference(name, kind)) < 1e-9


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"zero_stage": 3},
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 4, "zero_stage": 1},  # two ranks share each key head
        {**CP2, "cp_comm_type": "a2a"},
    ],
)
def test_attention_sinks_are_split_over_the_heads(settings: dict[str, Any]) -> None:
    """The parameter has an entry for each head, and transformers' plan of gpt-oss does not name it."""
    for result in run_ranks(4, train_with_engine, "gpt-oss", "plain", {"tensor_model_parallel_size": 2, **settings}):
        assert difference(result, _reference("gpt-oss", "plain")) < 1e-9


@pytest.mark.parametrize("row", [0, 3])
def test_a_model_of_torch(row: int) -> None:
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, train_with_engine, "torch", "plain", settings):
        assert difference(result, _reference("torch", "plain")) < 1e-9


PP2: dict[str, Any] = {**CP2, "pipeline_model_parallel_size": 2}
STAGES: list[tuple[int, dict[str, Any]]] = [
    (4, {**PP2, "cp_comm_type": "a2a", "recompute_granularity": "full", "pipeline_schedule": "zb_h1"}),
    (8, {**PP2, "tensor_model_parallel_size": 2}),
    (8, {**PP2, "zero_stage": 1, "cp_comm_type": "all_gather"}),
    (8, {**PP2, "context_parallel_size": 4, "zero_stage": 3}),
]
IN_STAGES = ("llama", "qwen3", "gemma3", "qwen3-moe")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("row", range(len(STAGES)))
@pytest.mark.parametrize(("name", "kind"), [*zip(IN_STAGES, (*KINDS, "packed"), strict=True)])
def test_stages_equal_the_model(name: str, kind: str, row: int) -> None:
    ranks, settings = STAGES[row]
    for result in run_ranks(ranks, train_with_engine, name, kind, settings):
        assert difference(result, _reference(name, kind)) < 1e-9


@pytest.mark.drawn(2)
@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3, "recompute_granularity": "full"}, {"cp_comm_type": "a2a"}])
@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("name", WITH_ROUTER_LOSS)
def test_router_loss_is_that_of_all_tokens(name: str, kind: str, settings: dict[str, Any]) -> None:
    expected = _reference(name, kind)
    without = name.removesuffix(" with its loss")
    if without in MODELS:
        assert abs(expected["losses"][0] - _reference(without, kind)["losses"][0]) > 1e-3
    for result in run_ranks(2, train_with_engine, name, kind, {**CP2, **settings}):
        assert difference(result, expected) < 1e-9


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("llama", "packed", {**CP2, "recompute_granularity": "full"}),
        ("torch", "plain", {**CP2, "zero_stage": 3}),
        ("qwen3", "padded", {**PP2, "cp_comm_type": "a2a"}),
    ],
)
def test_compiled_units(name: str, kind: str, settings: dict[str, Any]) -> None:
    ranks = 4 if "pipeline_model_parallel_size" in settings else 2
    compiled = {**settings, "compile": True, "compile_backend": "aot_eager"}
    for result, graphs in run_ranks(ranks, _train_compiled, name, kind, compiled):
        assert difference(result, _reference(name, kind)) < 1e-9
        assert 0 < graphs < 8  # none for another micro-batch


def _train_compiled(name: str, kind: str, settings: dict[str, Any]) -> tuple[Result, int]:
    result = train_with_engine(name, kind, settings)
    return result, counters["stats"]["unique_graphs"]


def test_loss_of_all_tokens() -> None:
    """(sum of masked token losses) / (number of such tokens of the global batch), which lie on few ranks."""
    reference = train_with_torch("llama", "plain", by_tokens=True)
    assert difference(reference, _reference("llama", "plain")) > 1e-3
    for result in run_ranks(4, partial(train_with_engine, by_tokens=True), "llama", "plain", {**CP2, "zero_stage": 2}):
        assert difference(result, reference) < 1e-9


ATTENTION, CONTEXT = "any_model.context_attention:", "any_model.context:ContextParallel."
DEFECTS: dict[str, tuple[str, str, str, str, str, dict[str, Any]]] = {
    "positions are those of a rank's own tokens": (
        *(CONTEXT + "whole_arguments", "torch.arange(length, device=reference.device)", "(torch.arange(length) % 16)"),
        *("llama", "plain", {}),
    ),
    "labels are shifted after the split": (
        *(CONTEXT + "whole_arguments", "if self._shifts_labels and", "if False and"),
        *("llama", "plain", {}),
    ),
    "documents attend to one another": (
        *(ATTENTION + "SplitForward._sequence", "self.documents if rule.packed else None", "None"),
        *("llama", "packed", {}),
    ),
    "padding is visible": (
        *(ATTENTION + "SplitForward._sequence", "None if self.visible is None else self._padding", "None"),
        *("llama", "padded", {}),
    ),
    "gradients are not summed over the ranks of a sequence": (
        *("data_parallel.settings:BucketKind.of", "spec.replica_axes", '("dp",)'),
        *("llama", "plain", {}),
    ),
    "each rank divides by its own number of tokens": (
        *(ATTENTION + "SplitForward._cross_entropy", "all_reduce_(terms, self.groups.whole)", "pass"),
        *("llama", "plain", {}),
    ),
    "windows are those of the first layer": (
        *(ATTENTION + "_mask_of_transformers", 'local_size if "sliding_window_overlay" in leaves else None', "None"),
        *("qwen3", "plain", {}),
    ),
    "scores are scaled as usual": (
        *(ATTENTION + "SplitForward.attention", "query * (scaling * root)", "query"),
        *("gemma3", "plain", {}),
    ),
    "every rank has the sinks of the first heads": (
        *(ATTENTION + "SplitForward.attention", "[heads.group.rank()]", "[0]"),
        *("gpt-oss", "plain", {"cp_comm_type": "a2a"}),
    ),
    "each rank has the router loss of its own tokens": (
        *("any_model.router_loss:loss_over_ranks", "reduce_from_region(torch.cat", "(lambda x, _: x)(torch.cat"),
        *("qwen3-moe with its loss", "plain", {}),
    ),
    "padding chooses experts": (
        *("any_model.router_loss:loss_over_ranks", "if forward.visible is not None:", "if False:"),
        *("qwen3-moe with its loss", "padded", {}),
    ),
    "every rank of a sequence counts the loss of stages": (
        *("any_model.pipeline:PipelineEngine._counts_loss", 'self.groups.index("cp") == 0', "True"),
        *("llama", "plain", {"pipeline_model_parallel_size": 2}),
    ),
    "a recomputed unit reads the documents of the last micro-batch": (
        *(ATTENTION + "current_forward", "documents=running.documents", "documents=None"),
        *("llama", "packed", {"recompute_granularity": "full"}),
    ),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", DEFECTS)
def test_comparison_finds(name: str) -> None:
    target, old, new, model, kind, settings = DEFECTS[name]
    train = partial(train_with_engine, is_proven=True)
    with planted(target, old, new):
        if (
            "divides" in name or "router loss" in name
        ):  # the losses of the ranks differ, which the first backward reports
            with pytest.raises(RankFailure, match="ranks of a sequence have losses"):
                run_ranks(2, train, model, kind, {**CP2, **settings})
            return
        ranks = 2 * settings.get("pipeline_model_parallel_size", 1)
        results = run_ranks(ranks, train, model, kind, {**CP2, **settings})
    assert max(difference(result, _reference(model, kind)) for result in results) > 1e-6


class Scores(TorchLayer):
    """Attention by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """``[b, n, 16]`` -> ``[b, n, 16]``."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -torch.inf)
        return self.out(scores.softmax(-1) @ value)


class TokenShift(TorchLayer):
    """A mean with the token before, after attention."""

    def forward(self, x: Tensor) -> Tensor:
        """``[b, n, 16]`` -> ``[b, n, 16]``."""
        y = super().forward(x)
        return y + F.pad(y[:, :-1], (0, 0, 1, 0))


class Masked(TorchLayer):
    """Attention with a mask tensor and dropout."""

    options: ClassVar[dict[str, Any]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``[b, n, 16]`` -> ``[b, n, 16]``."""
        query = x[:, None]
        return F.scaled_dot_product_attention(query, query, query, **self.options)[:, 0]


class MaskTensor(Masked):
    """A mask of local tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """``[b, n, 16]`` -> ``[b, n, 16]``."""
        self.options = {"attn_mask": torch.ones(x.shape[1], x.shape[1]).tril().bool()}
        return super().forward(x)


class Dropout(Masked):
    """Dropout of attention weights."""

    options: ClassVar[dict[str, Any]] = {"dropout_p": 0.1, "is_causal": True}


class OwnPositions(TorchModel):
    """Positions counted from 0 in the forward."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        return super().forward(tokens, targets)


class ShiftsTargets(TorchModel):
    """Targets shifted in the forward."""

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The mean loss."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        x = self.layers[0](self.embed(tokens) + self.positions(position_ids))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _with_layer(kind: type[nn.Module]) -> nn.Module:
    model = TorchModel()
    model.layers[1] = kind()
    return model


def _small(kind: str, **settings: Any) -> nn.Module:
    sizes = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **settings))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "mamba": (lambda: _small("Mamba"), {}, "MambaForCausalLM mixes tokens outside of scaled dot-product attention"),
    "linear attention": (
        lambda: _small("Qwen3Next", layer_types=["linear_attention", "full_attention"], num_experts=4),
        *({}, "layer_types 'linear_attention'"),
    ),
    "multi-head": (lambda: _with_layer(partial(nn.MultiheadAttention, 16, 2)), {}, "MultiheadAttention"),
    "scores": (lambda: _with_layer(Scores), {}, "layers.1.out (Linear) is the first that depends on tokens of other"),
    "shift": (lambda: _with_layer(TokenShift), {}, "layers.1 (TokenShift) is the first that depends on tokens of"),
    "mask": (lambda: _with_layer(MaskTensor), {}, "a mask tensor of shape [8, 8]"),
    "dropout": (lambda: _with_layer(Dropout), {}, "dropout=0.1 of attention weights"),
    "positions": (OwnPositions, {}, "layers.0.qkv (Linear) is the first that depends"),
    "targets": (ShiftsTargets, {}, "shift labels before the forward"),
    "heads": (TorchModel, {**CP4, "cp_comm_type": "a2a"}, "cp_comm_type exchanges the 2 heads"),
    "kinds": (TorchModel, {"cp_comm_type": ("a2a", "p2p")}, "must be one kind for all layers"),
    "list of layers": (
        *(lambda: PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2), {"pipeline_model_parallel_size": 2}),
        "context_parallel_size=2 with a PipelineModule",
    ),
    "ranks": (TorchModel, {"context_parallel_size": 3}, "context_parallel_size=3"),
    "router": (
        *(lambda: _small("Llama", num_attention_heads=2, output_router_logits=True), {}),
        "the auxiliary loss of LlamaForCausalLM is not load_balancing_loss_func",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name: str) -> None:
    _, settings, message = REFUSED[name]
    for text in run_ranks(4 if name in ("heads", "list of layers") else 2, _refused, name, {**CP2, **settings}):
        assert message in text and (name == "ranks" or "\n" not in text)


def _refused(name: str, settings: dict[str, Any]) -> str:
    with pytest.raises(MegatronError) as error:
        engine = megatron_core.initialize(REFUSED[name][0](), {"micro_batch_size": 2, **settings}).engine
        engine(**batches_of("torch", "plain", 1)[0])
    return str(error.value)


BATCHES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Any]], str]] = {
    "length": (lambda b: {k: v[:, :30] for k, v in b.items()}, "30 tokens cannot be cut into 2 x 2 chunks"),
    "mask": (lambda b: {**b, "attention_mask": torch.ones(2, 1, 32, 32)}, "attention_mask=[2, 1, 32, 32]"),
    "weights": (lambda b: {**b, "output_attentions": True}, "output_attentions=True"),
    "kept": (lambda b: {**b, "logits_to_keep": 1}, "logits_to_keep with context_parallel_size=2"),
    "cache": (lambda b: {**b, "past_key_values": ()}, "past_key_values with context_parallel_size=2"),
    "positions": (lambda b: {**b, "position_ids": torch.zeros(3, 2, 32)}, "position_ids of shape [3, 2, 32]"),
}


def test_batches_that_cannot_be_split_are_refused() -> None:
    for texts in run_ranks(2, _refused_batches):
        for text, (_, message) in zip(texts, BATCHES.values(), strict=True):
            assert message in text and "\n" not in text


def _refused_batches() -> list[str]:
    model = model_of("llama")
    model.set_attn_implementation("eager")
    engine = megatron_core.initialize(model, {**CP2, "micro_batch_size": 2}).engine
    texts = []
    for change, _ in BATCHES.values():
        with pytest.raises(MegatronError) as error:
            engine(**change(batches_of("llama", "plain", 1)[0]))
        texts.append(str(error.value))
    return texts


def test_losses_outside_of_the_model() -> None:
    """A loss of local tokens is refused; their sum over the ranks is that of the model."""
    for message, losses in run_ranks(2, _train_outside):
        assert "the context-parallel ranks of a sequence have losses from" in message
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def _train_outside() -> tuple[str, tuple[float, float]]:
    engine = megatron_core.initialize(model_of("llama"), {**CP2, "micro_batch_size": 2}).engine
    batch = batches_of("llama", "plain", 1)[0]
    labels = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), -100)], dim=1)
    logits = engine(input_ids=batch["input_ids"]).logits
    local = F.cross_entropy(logits.flatten(0, 1), engine.context.local(labels).flatten(), reduction="sum")
    with pytest.raises(MegatronError) as error:
        engine.backward(local, num_terms=terms_of(batch))
    engine.backward(engine.context.total(local), num_terms=terms_of(batch))
    with torch.no_grad():
        expected = float(engine(**batch).loss)
    return str(error.value), (engine.step().loss, expected)
