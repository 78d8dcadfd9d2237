"""Defects planted in post-training are found by the comparison with trl, or by the comparison of bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_core.post_training import policy_loss, sampler, token_batch
from megatron_core.post_training.step_data import StepData
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.defects.plant import planted
from tests.post_training import test_critics as critics
from tests.post_training import test_layouts as layouts
from tests.post_training import test_offload as offload
from tests.post_training import test_trl_policies as policies

Plant = Callable[[pytest.MonkeyPatch], None]


def _local_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_batch, "paired", lambda x, *_: x)


def _gradient_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    real = token_batch.paired
    patch.setattr(token_batch, "paired", lambda x, group, name, adjoint: real(x, group, name, "identity"))


def _means_over_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepData, "weights", lambda self, objective: [batch.mask for batch in self.tokens])


def _entropy_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    from megatron_core.parallel.groups import ALONE

    real = policy_loss.vocab_parallel_entropy
    patch.setattr(policy_loss, "vocab_parallel_entropy", lambda logits, group, size: real(logits, ALONE, size))


def _every_rank_reports(patch: pytest.MonkeyPatch) -> None:
    """Every tensor-parallel rank adds its log-probabilities to the gathered ones."""
    from megatron_core.parallel.micro_batch import SequenceSplit

    real = StepData.collect

    def collect(self: StepData, outputs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SequenceSplit, "owns_loss", True)
            return real(self, outputs)

    patch.setattr(StepData, "collect", collect)


def _outdated_weights(patch: pytest.MonkeyPatch) -> None:
    real = sampler.RolloutSampler.update_weights

    def update(self: sampler.RolloutSampler) -> int:
        return real(self) if self.version < 0 else 0

    patch.setattr(sampler.RolloutSampler, "update_weights", update)


def _one_window(patch: pytest.MonkeyPatch) -> None:
    """Only the first window of each message is sent."""
    from megatron_core.post_training import weights

    real = weights._windows
    patch.setattr(weights, "WINDOW_BYTES", 4096)
    patch.setattr(weights, "_windows", lambda moves: real(moves)[:1])


def _only_own_memory(patch: pytest.MonkeyPatch) -> None:
    """A rank does not write into the memory of the others."""
    from megatron_core.post_training import shared_weights

    def no_pieces(self: shared_weights.SharedWeights, pieces: Any) -> dict[int, Any]:
        return {rank: defaultdict(list) for rank in self._memories.keys() - {dist.get_rank()}}

    patch.setattr(shared_weights.SharedWeights, "pieces_of_others", no_pieces)


AGAINST_TRL: dict[str, tuple[Plant, str, str]] = {
    "sums over a trajectory are those of a rank": (_local_sums, "gspo", "cp2"),
    "the gradient of a sum over a trajectory is that of a rank": (_gradient_of_one_rank, "gspo", "cp2"),
    "the mean over trajectories is a mean over tokens": (_means_over_tokens, "grpo", "one process"),
    "entropy is that of a rank's vocabulary": (_entropy_of_one_rank, "mean over tokens, entropy", "tp2 sp"),
}
OF_BITS: dict[str, tuple[Plant, str, str, str]] = {
    "every tensor-parallel rank reports": (_every_rank_reports, "tp2 sp", "replicas", "auto"),
    "the sampler keeps the first weights": (_outdated_weights, "dp2 zero3", "tp2", "auto"),
    "messages of weights end after a window": (_one_window, "pp2", "replicas", "gloo"),
    "weights are not written into other memory": (_only_own_memory, "pp2", "replicas", "auto"),
}


@pytest.mark.parametrize("name", AGAINST_TRL)
def test_the_steps_of_trl_find(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind, layout = AGAINST_TRL[name]
    ranks = 1 if layout == "one process" else 2
    config = policies._config(tmp_path, **policies.LAYOUTS[layout])
    plant(monkeypatch)
    (steps, *_) = run_ranks(ranks, policies._steps, config, kind, True)
    theirs = policies.THEIRS[kind]
    assert any(ours != pytest.approx(expected, rel=1e-6) for ours, expected in zip(steps, theirs, strict=True))


VALUE_HEAD = "features.value_head.head:ValueHead"
OF_CRITICS: dict[str, tuple[str, tuple[str, str], str]] = {
    "the gradient of the head is that of a rank's tokens": (
        f"{VALUE_HEAD}.__init__",
        ("partial_grad=context.sequence_parallel", "partial_grad=False"),
        "tp2 sp",
    ),
    "the gradient of values is summed over ranks that compute the same loss": (
        f"{VALUE_HEAD}.forward",
        ("partial_grad=False", "partial_grad=True"),
        "tp2 sp",
    ),
    "the head sums its gradient over ranks with the same tokens": (
        f"{VALUE_HEAD}.__init__",
        ("partial_grad=context.sequence_parallel", "partial_grad=True"),
        "tp2",
    ),
    "the smaller of two value losses is taken": (
        "post_training.objectives:value_loss",
        ("torch.maximum", "torch.minimum"),
        "one process",
    ),
    "limits of values are around the returns": (
        "post_training.objectives:value_loss",
        ('old = batch["old_values"]', "old = returns"),
        "one process",
    ),
}


@pytest.mark.parametrize("name", OF_CRITICS)
def test_the_steps_of_a_critic_find(name: str, tmp_path: Path) -> None:
    target, (old, new), layout = OF_CRITICS[name]
    config = critics._config(critics._folder(tmp_path, layout), layout)
    expected = critics._steps_of_transformers(tmp_path, critics.CLIP)
    with planted(target, old, new):
        (steps, *_) = run_ranks(critics._ranks(layout), critics._critic_steps, config, critics.CLIP, True)
    assert any(ours != pytest.approx(theirs, rel=1e-6) for ours, theirs in zip(steps, expected, strict=True))


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        (
            "post_training.trajectories:Trajectory.of_text",
            "[*tokens, tokens[-1]], [0] * (len(tokens) - 1)",
            "tokens, [0] * (len(tokens) - 2)",
        ),
        ("post_training.objectives:bradley_terry", "rewards[0::2], rewards[1::2]", "rewards.chunk(2)"),
    ],
)
def test_the_steps_of_a_reward_model_find(target: str, old: str, new: str, tmp_path: Path) -> None:
    config = critics._config(critics._folder(tmp_path, "one process"), "one process")
    with planted(target, old, new):
        (steps,) = run_ranks(1, critics._reward_steps, config, "pairs, centered", True)
    theirs = critics.OF_TRL["pairs, centered"]
    assert any(ours != pytest.approx(expected, rel=1e-6) for ours, expected in zip(steps, theirs, strict=True))


@pytest.mark.parametrize("name", OF_BITS)
def test_the_bits_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, trained, sampled, backend = OF_BITS[name]
    plant(monkeypatch)
    arguments = layouts._config(trained), layouts.SAMPLED[sampled], True, 2
    try:
        steps, *_ = run_ranks(2, layouts._learn, *arguments, backend=backend)
    except RankFailure as failure:
        # Memory that no message has filled may hold NaN, of which no token can be sampled.
        assert "no token can be sampled" in str(failure)
    else:
        assert any(step[0] != 0.0 for step in steps)


def test_the_bits_after_a_while_outside_find_lost_state(tmp_path: Path) -> None:
    ranks, settings = offload.LAYOUTS["dp2 zero3"]
    config = offload._config(**settings)
    expected = run_ranks(ranks, offload._losses, config, None)
    with planted("features.offload.state:OffloadedState.restore", "chunk.copy_(on_host)", "pass"):
        assert run_ranks(ranks, offload._losses, config, tmp_path) != expected
