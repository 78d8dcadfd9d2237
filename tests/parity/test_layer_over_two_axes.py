"""A custom layer whose weight is split over two axes, with replicas over a third.

Initialization, gradients, norm, AdamW, replica checks, checkpoint and another layout support it without changes,
because all of them read only the parameters' ``ShardSpec``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.checkpoint import CheckpointReader, Save, parameter_pieces, save_checkpoint
from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import DataParallel, DataParallelSettings
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import all_reduce_, reduce_from_region
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.initialization import Normal, initialise_by_name
from megatron_core.parallel.sharding import allocate, replicated, split, split_fused, split_over
from megatron_core.reports.replicas import Replicas
from megatron_core.training.state import optimizer_pieces, updated_pieces
from megatron_core.verify.ranks import run_ranks
from megatron_core.verify.trace import RankTrace, assemble

EXPERTS, FFN, HIDDEN, SAMPLES = 4, 6, 5, 8
OPTIMIZER = OptimizerConfig(lr=1e-2, adam_eps=1e-3, clip_grad=0.1)
# tp, dp, etp, ep, zero_stage; the expert view has edp = tp dp / (etp ep) copies
LAYOUTS = {
    "etp2 ep2 edp2": (4, 2, 2, 2, 0),
    "etp2 ep2 edp2 zero1": (4, 2, 2, 2, 1),
    "ep2 edp2 zero1": (2, 2, 1, 2, 1),
    "etp2": (2, 1, 2, 1, 0),
}


class TinyExperts(nn.Module):
    """x -> sum over all experts e of gate_e sum_f tanh(W_ef x) silu(V_ef x), for every token.

    W and V are one tensor ``[experts, 2 ffn, hidden]``: experts over ep, both halves of their rows over etp. Each rank
    of etp has a part of the gradient of its experts' gates.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        (e, ep), (t, etp) = ((groups.index(axis), groups.size(axis)) for axis in ("ep", "etp"))
        shape, gates = (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS,)
        over_etp = split_fused(shape, (FFN, FFN), t, etp, dim=1, axis="etp")
        spec = split_over(split(shape, 0, e, ep, axis="ep"), over_etp, replica_axes=("edp",))
        self.weight = allocate(spec, torch.float64, "cpu")
        whole = replicated(gates, t, axis="etp", partial_grad=True)
        gate_spec = split_over(split(gates, 0, e, ep, axis="ep"), whole, replica_axes=("edp",))
        self.gate = allocate(gate_spec, torch.float64, "cpu")
        # An additional dense parameter.
        self.bias = allocate(replicated((1,), groups.index("tp")), torch.float64, "cpu")
        self.group = groups.group("etp-ep")
        for name, parameter in self.named_parameters():
            initialise_by_name(parameter, Normal(0.5), 1, name)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, hidden]`` -> ``[n]``."""
        inner = torch.einsum("nh,efh->nef", x, self.weight)
        first, second = inner.chunk(2, dim=-1)
        own = torch.einsum("nef,e->n", torch.tanh(first) * nn.functional.silu(second), self.gate)
        return reduce_from_region(own, self.group) + self.bias


class Training:
    """One rank's training of ``TinyExperts``."""

    def __init__(self, layout: str | None) -> None:
        tp, dp, etp, ep, zero_stage = LAYOUTS[layout] if layout else (1, 1, 1, 1, 0)
        self.groups = ParallelGroups(Grid(tp=tp, dp=dp, etp=etp, ep=ep), dist.get_rank())
        self.model, self.record = TinyExperts(self.groups), RankTrace()
        settings = DataParallelSettings(zero_stage=zero_stage, overlap_grad_reduce=True, bucket_size=16)
        self.data = DataParallel({0: self.model}, self.groups, settings)
        self.optimizer = Optimizer(self.data, OPTIMIZER, self.groups, LossScale(1.0))

    def train(self, steps: range) -> None:
        """Run steps on this data-parallel rank's part of each step's samples."""
        for step in steps:
            data = torch.from_numpy(np.random.default_rng(step).normal(size=(SAMPLES, HIDDEN + 1)))
            own = data.chunk(self.groups.size("dp"))[self.groups.index("dp")]
            self.data.zero_grad()
            self.data.enable_grad_sync(0)
            loss = (self.model(own[:, :-1]) - own[:, -1]).square().sum() / SAMPLES
            loss.backward()
            self.data.finish_grad_sync()
            self.record.add_gradients(self.data, step)
            norm = self.optimizer.gradient_norm().item()
            self.record.norms.append(norm)
            assert not self.optimizer.step(OPTIMIZER.lr, norm)
            self.data.start_param_sync()
            total = loss.detach().clone()
            all_reduce_(total, self.groups.group("dp"))
            self.record.losses.append(total.item())

    def end(self) -> RankTrace:
        """The record, with the weights; copies must be bitwise equal."""
        self.data.finish_param_sync()
        replicas = Replicas(self.model.named_parameters(), self.groups, torch.device("cpu"))
        assert replicas.differences(replicas.hashes()) == []
        self.record.add_weights(self.data, [self.model])
        return self.record

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state."""
        self.data.finish_param_sync()
        save = Save(folder, 1, {}, rank=self.groups.rank, ranks=dist.get_world_size())
        save_checkpoint(save, updated_pieces(self.data, self.optimizer), _all_agree)

    def load(self, folder: Path) -> None:
        """Read the state written by another layout."""
        with CheckpointReader(folder / "iter_0000001") as reader:
            reader.fill(parameter_pieces(self.model.named_parameters()))
            reader.fill(optimizer_pieces(self.optimizer))
        self.optimizer.set_steps_taken(2)


def _all_agree(ok: bool) -> bool:
    dist.barrier()
    return ok


def _train(layout: str | None, folder: Path) -> RankTrace:
    """Four steps; the state after two of them is saved."""
    training = Training(layout)
    training.train(range(2))
    training.save(folder)
    training.train(range(2, 4))
    return training.end()


def _resume(layout: str | None, folder: Path) -> RankTrace:
    training = Training(layout)
    training.model.weight.data.fill_(torch.nan)  # so that everything must be loaded from the checkpoint
    training.load(folder)
    training.train(range(2, 4))
    return training.end()


def _ranks(layout: str | None) -> int:
    return LAYOUTS[layout][0] * LAYOUTS[layout][1] if layout else 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    """One process: its trace, and its checkpoint."""
    folder = tmp_path_factory.mktemp("alone")
    return assemble(run_ranks(1, _train, None, folder)), folder


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_computes_what_one_process_computes(layout: str, alone: tuple, tmp_path: Path) -> None:
    expected, folder = alone
    found = assemble(run_ranks(_ranks(layout), _train, layout, tmp_path))
    resumed = assemble(run_ranks(_ranks(layout), _resume, layout, folder))  # from one process
    returned = assemble(run_ranks(1, _resume, None, tmp_path))  # and to it
    assert found.faults == resumed.faults == returned.faults == []
    close = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(found.losses, expected.losses, **close)
    np.testing.assert_allclose(found.norms, expected.norms, **close)
    assert min(expected.norms) > OPTIMIZER.clip_grad, "clipping is a part of the proof"
    assert found.tensors.keys() == expected.tensors.keys()
    for name, values in expected.tensors.items():
        np.testing.assert_allclose(found.tensors[name], values, **close, err_msg=name)
        for other in (resumed, returned):
            if name in other.tensors:
                np.testing.assert_allclose(other.tensors[name], values, **close, err_msg=name)
    assert {"weight.weight", "weight.gate", "grad3.bias"} <= resumed.tensors.keys()
