"""FLOPs of sparse attention by formula are those that torch counts in the layer; the planner's time has all parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_core.features.sparse_attention.settings import INDEXER_LOSS
from megatron_core.parallel.groups import LocalGroup
from megatron_core.planner.hardware import read_hardware
from megatron_core.planner.layer_time import LayerClock
from megatron_core.planner.sparse_attention import sparse_work
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses
from megatron_core.transformer.layer_spec import layer_spec
from tests.features.sparse_attention.test_sparse_attention import rotary
from tests.parity.sparse_rows import DSA
from tests.runs import tiny_config

LENGTH, BATCH = 11, 2
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "dsa_indexer_topk": 4, "dsa_indexer_n_heads": 3}
SIZES |= {"attention_backend": "unfused", "seq_length": LENGTH, "micro_batch_size": BATCH, "fp64": True}


@pytest.mark.parametrize(
    "settings",
    [{}, {"dsa_indexer_loss_coeff": 0.0}, {"dsa_indexer_topk": LENGTH}, {"dsa_indexer_warmup": True}],
    ids=["loss and selection", "no loss", "all keys selected", "warm-up"],
)
def test_flops_are_counted_in_the_layer(settings: dict[str, Any]) -> None:
    config = tiny_config(**DSA | SIZES | settings)
    model = config.model
    context = LayerContext(model, ModelParallelConfig(params_dtype=torch.float64), LocalGroup(), 1)
    core = layer_spec(model, 0).self_attention(context, 0).core_attention.train()
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter)
    channels = model.qk_head_dim + model.qk_pos_emb_head_dim
    widths = (channels, channels, model.v_head_dim)
    inputs = [torch.randn(LENGTH, BATCH, 2, size, dtype=torch.float64, requires_grad=True) for size in widths]
    hidden, latent = (torch.randn(LENGTH, BATCH, size, dtype=torch.float64) for size in (16, model.q_lora_rank or 16))
    found = []
    losses = AuxiliaryLosses((INDEXER_LOSS,), sequences=BATCH, tokens=torch.tensor(22.0, dtype=torch.float64))
    sequence = SequenceContext(rotary=rotary(), auxiliary_losses=losses.of_micro_batch(0))
    with FlopCounterMode(display=False) as counter:
        out = core(*inputs, sequence, hidden, latent)
        found.append(counter.get_total_flops())
        out.sum().backward()
        found.append(counter.get_total_flops() - found[0])
    projections = sum(2 * LENGTH * BATCH * p.numel() for name, p in core.named_parameters() if p.dim() == 2)
    forward, backward = sparse_work(config)
    assert found[0] == forward.attention + forward.wide + projections
    assert found[1] == backward.attention + backward.wide + projections * model.trains_indexers


def test_time_grows_with_the_indexer_and_its_loss() -> None:
    flash = {"attention_backend": "auto", "seq_length": 4096, "fp64": False, "bf16": True, "dsa_indexer_topk": 512}

    def seconds(**settings: Any) -> tuple[float, float]:
        config = tiny_config(**DSA | SIZES | flash | settings)
        parts = LayerClock(config, read_hardware("h100"), 1, 1000).mixing(0)
        return sum(parts[0].values()), sum(parts[1].values())

    dense = seconds(experimental_attention_variant=None, dsa_indexer_loss_coeff=0.0, cp_comm_type=("p2p",))
    selects, trains = seconds(dsa_indexer_loss_coeff=0.0), seconds()
    every = seconds(dsa_indexer_loss_coeff=0.0, dsa_indexer_topk=4096)
    assert dense < every < selects < trains
    assert trains[1] > selects[1] == every[1]
    # A causal kernel computes half of the pairs; the masked one computes all of them, forward again in backward.
    assert every[0] > 2 * dense[0] and every[1] > 2.5 * dense[1]
