"""``DistributedDataParallel``, the optimizer and checkpoints under Megatron Core's names, in layouts of two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import parallel_state
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.models.gpt import model as own
from megatron_core.parallel.micro_batch import LaterTokens, SequenceDetails, SequenceSplit
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses
from megatron_core.transformer.context import ForwardState
from megatron_core.transformer.layer_spec import auxiliary_loss_names
from megatron_core.verify.ranks import run_ranks

LENGTH, VOCABULARY, MICRO_BATCHES, STEPS = 8, 24, 4, 3
LAYOUTS = {
    "tp2 sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "pp2 v2": {"pp": 2, "chunks": 2},
    "dp2": {"overlap": True},
    "dp2 zero1": {"zero": "optim", "overlap": True},
    "dp2 zero3": {"zero": "optim_grads_params"},
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "mtp_num_layers": 1,
}
"""Layers that add auxiliary losses, and multi-token prediction."""


class Training:
    """A model with its optimizer; the loss is the mean over the tokens of the global batch, whose masks are ragged."""

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        chunks: int = 1,
        sp: bool = False,
        zero: str = "no_shard",
        overlap: bool = False,
        ep: int = 1,
        **settings: Any,
    ) -> None:
        parallel_state.destroy_model_parallel()
        experts = {"expert_model_parallel_size": ep}
        parallel_state.initialize_model_parallel(tp, pp, chunks if chunks > 1 else None, **experts)
        model_parallel_cuda_manual_seed(5)
        self.config = TransformerConfig(
            num_layers=4,
            hidden_size=16,
            num_attention_heads=4,
            hidden_dropout=0.1,
            attention_dropout=0.0,
            params_dtype=torch.float64,
            pipeline_dtype=torch.float64,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            sequence_parallel=sp,
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize_model_grads,
            **experts,
            **settings,
        )
        ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy=zero, overlap_grad_reduce=overlap)
        self.chunks = [DistributedDataParallel(self.config, ddp, self._stage(chunk, chunks)) for chunk in range(chunks)]
        if overlap:
            self.config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        adam = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
        self.optimizer = get_megatron_optimizer(adam, self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 1e-3, 1, 10, "cosine", 0.1, 0.1, 10, "constant"
        )

    def _stage(self, chunk: int, chunks: int) -> GPTModel:
        first = parallel_state.is_pipeline_first_stage() and chunk == 0
        last = parallel_state.is_pipeline_last_stage() and chunk == chunks - 1
        spec = get_gpt_layer_local_spec(self.config.num_moe_experts)
        return GPTModel(
            self.config,
            spec,
            VOCABULARY,
            LENGTH,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=True,
            vp_stage=chunk if chunks > 1 else None,
            mtp_block_spec=get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=False),
        )

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """The micro-batches of one sequence of this rank, of ``MICRO_BATCHES`` sequences in total."""
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES, LENGTH + 1), generator=draw)
        mask = torch.rand(MICRO_BATCHES, LENGTH, generator=draw, dtype=torch.float64) < 0.6
        mask[0] = False
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        numbers = torch.arange(MICRO_BATCHES) + MICRO_BATCHES * step
        rows = zip(tokens.split(1), mask.to(torch.float64).split(1), numbers.split(1), strict=True)
        return [{"tokens": t, "mask": m, "number": n} for t, m, n in list(rows)[rank::size]]

    def take(self, step: int) -> tuple[float, float]:
        """Take a step and return the sum of this rank's losses, and the norm."""
        self.optimizer.zero_grad()
        batches = self.batches(step)
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        taken, norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        assert taken
        return sum(float(report["sum"]) for report in reports), norm

    def weights(self) -> dict[str, Any]:
        """All tensors that a checkpoint of it contains."""
        model = [chunk.sharded_state_dict() for chunk in self.chunks]
        return {
            "model": {str(i): part for i, part in enumerate(model)},
            "optimizer": self.optimizer.sharded_state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }


def forward_step(batches: Any, model: Any) -> Any:
    batch = next(batches)
    tokens = batch["tokens"]
    output = model(tokens[:, :-1], labels=tokens[:, 1:], sample_index=batch["number"], loss_mask=batch["mask"])
    return output, partial(loss_func, batch["mask"])


def loss_func(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = (losses * mask).sum()
    return total, mask.sum().long(), {"sum": total.detach()}


def run(folder: str, **layout: Any) -> tuple[list[tuple[float, float]], int]:
    training = Training(**layout)
    found = [training.take(step) for step in range(STEPS)]
    if layout.get("zero") != "optim_grads_params":
        dist_checkpointing.save(training.weights(), folder)
    return found, training.scheduler.num_steps


def loaded(folder: str, **layout: Any) -> tuple[dict[str, np.ndarray], Any]:
    """All weights in one process, and the loss and norm of one further step."""
    training = Training(**layout)
    state = dist_checkpointing.load(training.weights(), folder)
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    weights = {n: p.detach().numpy().copy() for n, p in training.chunks[0].module.named_parameters()}
    return weights, training.take(STEPS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_ranks(1, run, folder)[0][0], run_ranks(1, loaded, folder)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_and_checkpoints_are_those_of_one_process(alone: Any, layout: str, tmp_path: Path) -> None:
    expected, (weights, more) = alone
    ranks = run_ranks(2, partial(run, str(tmp_path), **LAYOUTS[layout]))
    sums = np.array([[loss for loss, _ in found] for found, _ in ranks])
    total = sums.sum(0) if layout.startswith("dp") else sums.max(0)
    np.testing.assert_allclose(total, [loss for loss, _ in expected], rtol=0, atol=1e-9)
    for found, steps in ranks:
        np.testing.assert_allclose([norm for _, norm in found], [norm for _, norm in expected], rtol=0, atol=1e-9)
        assert steps == STEPS
    if layout == "dp2 zero3":
        return
    again, next_step = run_ranks(1, loaded, str(tmp_path))[0]
    assert set(again) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_allclose(again[name], weight, rtol=0, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(next_step, more, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def experts_alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(1, partial(run, str(tmp_path_factory.mktemp("experts")), **EXPERTS))[0][0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", [{"tp": 2, "sp": True}, {"pp": 2}, {"ep": 2, "overlap": True}], ids=str)
def test_losses_of_layers_are_those_of_one_process(experts_alone: Any, layout: dict, tmp_path: Path) -> None:
    for found, _ in run_ranks(2, partial(run, str(tmp_path), **layout, **EXPERTS)):
        norms, expected = ([norm for _, norm in each] for each in (found, experts_alone))
        np.testing.assert_allclose(norms, expected, rtol=0, atol=1e-9)


def whole_batch(per_token: bool) -> tuple[float, float, dict[str, float]]:
    """The norm of a step's gradients, that of this package's own model whose losses are means over the whole batch, and
    the values of the losses there; all tokens count, so that means of micro-batches are those of the batch."""
    training = Training(**EXPERTS)
    training.config.calculate_per_token_loss = per_token
    full = [batch | {"mask": torch.ones_like(batch["mask"])} for batch in training.batches(0)]
    training.batches = lambda step: full  # type: ignore[method-assign]
    twin, tokens = training._stage(0, 1), MICRO_BATCHES * LENGTH
    losses = AuxiliaryLosses(
        auxiliary_loss_names(twin.model_config),
        sequences=MICRO_BATCHES,
        tokens=torch.tensor(float(tokens), dtype=torch.float64),
        counts={"mtp_1_loss": torch.tensor(float(tokens - MICRO_BATCHES), dtype=torch.float64)},
        counting_layers=(range(5), 5),
    )
    for micro, batch in enumerate(full):
        ids = batch["tokens"]
        given = {"labels": ids[:, 1:], "loss_mask": batch["mask"]}
        later = LaterTokens.of(given, 1, SequenceSplit(), ids.device)
        found = own.GPTModel.forward(
            twin,
            ids[:, :-1],
            labels=given["labels"],
            sequences=SequenceDetails(loss_mask=batch["mask"], sample_index=batch["number"], later=later),
            state=ForwardState(auxiliary_losses=losses.of_micro_batch(micro)),
        )
        (found.sum() / tokens).backward()
    squares = sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None)
    values = losses.means(losses.totals(torch.device("cpu"), owns_loss=True).tolist())
    return training.take(0)[1], squares**0.5, values


@pytest.mark.parametrize("per_token", [True, False])
def test_losses_of_layers_count_once(per_token: bool) -> None:
    ours, expected, values = run_ranks(1, whole_batch, per_token)[0]
    assert ours == pytest.approx(expected, abs=1e-12)
    assert set(values) == {"load_balancing_loss", "z_loss", "mtp_1_loss"}
    assert all(value > 0.1 for value in values.values())


def by_hand() -> tuple[float, float]:
    """The norm of the first step's gradients, and the norm by autograd of only the mean loss."""
    training = Training()
    plain, batches = training._stage(0, 1), training.batches(0)
    total = sum(
        (plain(b["tokens"][:, :-1], labels=b["tokens"][:, 1:], sample_index=b["number"]) * b["mask"]).sum()
        for b in batches
    )
    (total / sum(b["mask"].sum() for b in batches)).backward()
    squares = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    return training.take(0)[1], squares**0.5


def test_gradients_are_those_of_the_mean_over_tokens() -> None:  # C3
    ours, expected = run_ranks(1, by_hand)[0]
    assert ours == pytest.approx(expected, abs=1e-12)


def test_a_step_begins_with_the_next_forward() -> None:  # C35
    """torch's optimizers clear only ``grad``; the collected gradients must be cleared, too."""
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.Linear(3, 2))
    x = torch.randn(4, 3)
    for _ in range(2):
        model(x).sum().backward()
        model.finish_grad_sync()
        torch.testing.assert_close(model.module.weight.grad, x.sum(0).expand(2, 3))
        with torch.no_grad():
            model(x)
        torch.testing.assert_close(model.module.weight.grad, x.sum(0).expand(2, 3))


def test_objects_and_plain_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    kept = dist_checkpointing.LocalNonpersistentObject(object())
    state = {"a": {"b": 3, "words": ["x"]}, "t": torch.arange(3.0), "kept": kept}
    dist_checkpointing.save(state, tmp_path, content_metadata={"version": 1})
    empty = {"a": {"b": 0, "words": []}, "t": torch.zeros(3), "kept": kept}
    back = dist_checkpointing.load(empty, tmp_path)
    assert back["a"] == {"b": 3, "words": ["x"]}
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=back) == {"version": 1}
    assert torch.equal(back["t"], torch.arange(3.0))
    assert back["kept"] is kept.unwrap()
    with pytest.raises(CheckpointError, match="tensors and JSON values"):
        dist_checkpointing.save({"f": object()}, tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        dist_checkpointing.load({}, tmp_path / "nowhere")


class Halving(MegatronModule):
    """A module of 16 bits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return self.linear(x)


def test_16_bit_models_take_and_give_32() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2, bf16=True)
    assert config.params_dtype == torch.bfloat16
    model = Float16Module(config, Halving(config))
    assert model(torch.randn(2, 4)).dtype == torch.float32
    assert set(model.sharded_state_dict("p.")) == {"p.linear.weight", "p.linear.bias"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DistributedDataParallelConfig(nccl_ub=True), "nccl_ub is not supported"),
        (
            lambda: DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, param_name_patterns_for_fp32_local_accumulation=("all",)
            ),
            "leave one of them out",
        ),
        (lambda: get_megatron_optimizer(OptimizerConfig(lr=0.1), [torch.nn.Linear(1, 1)]), "DistributedDataParallel"),
        (lambda: OptimizerConfig(lr=0.1, log_num_zeros_in_grad=True).translated(), "log_num_zeros_in_grad"),
        (lambda: ChainedOptimizer([]), "call get_megatron_optimizer"),
    ],
)
def test_what_is_not_supported_is_said(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
