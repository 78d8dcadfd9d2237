"""Compressed gradients in every ZeRO stage against a simulation of all ranks in one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_core
from megatron_core.features.compression import powersgd, signs
from megatron_core.verify.ranks import run_ranks
from tests.any_model.models import (
    BATCH,
    COMMON,
    Result,
    call,
    difference,
    loss_in,
    model_of,
    samples_of,
    train_with_engine,
)
from tests.defects.plant import planted
from tests.features.compression.compression_reference import EPS, LR, Layout, train

METHODS: dict[str, dict[str, Any]] = {
    "powersgd": {"grad_compression": "powersgd", "powersgd_rank": 1},
    "onebit-adam": {"grad_compression": "onebit-adam"},
}
SHARED = {"grad_compression_warmup_iters": 1, "ddp_bucket_size": 1500, "lr": LR, "adam_eps": EPS}


def _layouts(settings: dict[str, Any]) -> list[Layout]:
    config = {**COMMON, "global_batch_size": BATCH, **settings}
    engine, *_ = megatron_core.initialize(model_of("llama"), config, training_data=samples_of("llama"))
    data = engine.data_parallel
    assert data.compressor is not None
    found = []
    for bucket in data.buckets:
        factors = [t.clone() for kind, t, _ in data.compressor.state(bucket) if kind.startswith("factor")]
        found.append(Layout(bucket.names, bucket.offsets, bucket.weights.numel(), factors))
    return found


def _compare(ranks: int, method: str, settings: dict[str, Any], clip: float) -> float:
    settings = {**METHODS[method], **SHARED, "clip_grad": clip, **settings}
    layouts = run_ranks(ranks, _layouts, settings)[0]
    expected = train("llama", ranks, layouts, method, warmup=1, clip=clip)
    return max(difference(found, expected) for found in run_ranks(ranks, _train, settings))


def _train(settings: dict[str, Any]) -> Result:
    return train_with_engine("llama", **settings)


ROWS = {
    "zero0": (2, {}, 0.0),
    "zero0 clip": (4, {"overlap_grad_reduce": True}, 0.5),
    "zero1 clip": (2, {"zero_stage": 1, "overlap_grad_reduce": True}, 0.5),
    "zero2 clip": (2, {"zero_stage": 2}, 0.5),
    "zero2 overlap": (4, {"zero_stage": 2, "overlap_grad_reduce": True}, 0.0),
    "zero3 overlap": (2, {"zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True}, 0.5),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row", ROWS)
def test_steps_equal_the_simulation(row: str, method: str) -> None:
    ranks, settings, clip = ROWS[row]
    assert _compare(ranks, method, settings, clip) < 1e-9


DEFECTS = {
    "the error of messages is forgotten": ("SignSums._sum", "message.add_(errors)", "pass", "onebit-adam"),
    "the error of shares is dropped": (
        "SignSums._sum",
        "total = share.clone()",
        "total = share * 0",
        "onebit-adam",
    ),
    "each rank answers with the first share's error": (
        *("SignSums._sum", "trained.view(size, -1)[group.rank()]", "trained.view(size, -1)[group.rank()] * 0.5"),
        "onebit-adam",
    ),
    "a scale of one rank for all": (
        *("SignSums._sum", "total += _decompressed(*_parts_of(row, scale.dtype))"),
        *("total += _decompressed(_parts_of(row, scale.dtype)[0], scale)", "onebit-adam"),
    ),
    "the momentum of every rank counts": (
        "OneBitAdam.reduce_",
        "self.beta1 / bucket.dp_group.size()",
        "self.beta1",
        "onebit-adam",
    ),
    "gathered momenta are not clipped": ("OneBitAdam.commit", "grads.mul_(factor)", "pass", "onebit-adam"),
    "errors are not divided by the ranks": ("PowerSGD.reduce_", "alpha=1.0 / group.size()", "alpha=1.0", "powersgd"),
    "errors are not stored": ("PowerSGD.commit", "stored.copy_(errors)", "pass", "powersgd"),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", DEFECTS)
def test_the_simulation_finds_a_defect(name: str) -> None:
    function, old, new, method = DEFECTS[name]
    module = "powersgd" if method == "powersgd" else "signs"
    with planted(f"features.compression.{module}:{function}", old, new):
        assert _compare(2, method, {"zero_stage": 1}, 0.5) > 1e-4


SENDS = [
    *((powersgd, "all_reduce_"), (signs, "all_reduce_")),
    *((signs, "start_all_to_all_rows"), (signs, "all_gather_flat_")),
]


def _events(settings: dict[str, Any], overlap: bool) -> tuple[list[str], Result]:
    """The messages of compressed sums and the gradients of parameters, in their order in the last step."""
    events: list[str] = []
    for module, name in SENDS:
        send = getattr(module, name)

        def noted(*args: Any, send: Any = send, **kwargs: Any) -> Any:
            events.append("message")
            return send(*args, **kwargs)

        setattr(module, name, noted)

    def watch(engine: megatron_core.Engine) -> None:
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))

    config = {**COMMON, "global_batch_size": BATCH, **settings, "overlap_grad_reduce": overlap}
    engine, _, loader, _ = megatron_core.initialize(
        model_of("llama"), config, training_data=samples_of("llama"), shuffle=False
    )
    watch(engine)
    for batch in loader:
        events.append("micro-batch")
        engine.backward(loss_in(call(engine, batch)))
        engine.step()
    last = len(events) - events[::-1].index("micro-batch")
    return events[last:], {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", [1, 2])
def test_messages_start_during_the_backward_and_change_no_bit(stage: int, method: str) -> None:
    settings = {**METHODS[method], **SHARED, "zero_stage": stage}
    on, off = (run_ranks(2, _events, settings, overlap) for overlap in (True, False))
    for (early, weights), (late, expected) in zip(on, off, strict=True):
        assert late.index("message") > len(late) - 1 - late[::-1].index("gradient"), "after the backward"
        last_gradient = len(early) - 1 - early[::-1].index("gradient")
        hidden, sent = early[:last_gradient].count("message"), early.count("message")
        assert sent == late.count("message") and hidden >= 0.6 * sent
        assert all((weights[name] == expected[name]).all() for name in expected)
