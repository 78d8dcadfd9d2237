"""Peaks of training steps on CPU ranks, counted by the allocator, against the memory model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.config.layer_settings import LayerBlock, LayerPart
from megatron_core.features.layer_sizes.settings import write_blocks
from megatron_core.ops.native import unavailable_reason
from megatron_core.parallel import World
from megatron_core.planner.layout import Layout
from megatron_core.reports.dry_run import RankEstimate
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.sample import WHOLE_MATRIX

LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
}
SIZES = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 1024,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 100,
    "global_batch_size": 8,
    "micro_batch_size": 2,
}
BLOCKS = (
    LayerBlock(LayerPart(size=2), LayerPart(size=1024)),
    LayerBlock(LayerPart(linear=True), LayerPart(size=256)),
    LayerBlock(LayerPart(), LayerPart(linear=True)),
    LayerBlock(LayerPart(no_op=True), LayerPart(size=512)),
)
SIZED = {"heterogeneous_layers_config_encoded_json": write_blocks(BLOCKS)}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("1 process", LLAMA),
    "zero3": ("dp2 zero3", LLAMA),
    "GPT": ("1 process", {}),
    "GPT, bf16": ("1 process", {"bf16": True}),
    "Llama, bf16": ("1 process", LLAMA | {"bf16": True}),
    "many tokens": ("1 process", {"vocab_size": 16384}),
    "selective recomputation": ("1 process", LLAMA | {"recompute_granularity": "selective"}),
    "zero1": ("dp2 zero1", LLAMA),
    "zero2": ("dp2 zero2", LLAMA),
    "tp2 sp": ("tp2 sp", LLAMA),
    "hidden dropout": ("1 process", {"hidden_dropout": 0.1}),
    "grouped queries": ("1 process", LLAMA | {"group_query_attention": True, "num_query_groups": 2}),
    "untied embeddings": ("1 process", LLAMA | {"untie_embeddings_and_output_weights": True}),
    "larger micro-batches": ("1 process", LLAMA | {"micro_batch_size": 4}),
    "linear biases": ("1 process", {"position_embedding_type": "alibi"}),
    "long sequences": ("1 process", LLAMA | {"seq_length": 1024, "micro_batch_size": 1}),
    "8 layers": ("1 process", LLAMA | {"num_layers": 8}),
    "experts": ("1 process", LLAMA | {"num_experts": 4, "moe_ffn_hidden_size": 256, "moe_router_topk": 2}),
    "layers of different sizes": ("tp2 sp", LLAMA | SIZED),
    "lion": ("1 process", LLAMA | {"optimizer": "lion"}),
    "many tokens, zero1": ("dp2 zero1", LLAMA | {"vocab_size": 16384}),
    "many tokens, tp2": ("tp2", LLAMA | {"vocab_size": 16384}),
    "full recomputation, zero3": ("dp2 zero3", LLAMA | FULL),
    "zero1, bf16": ("dp2 zero1", LLAMA | {"bf16": True}),
    "zero3, bf16": ("dp2 zero3", LLAMA | {"bf16": True}),
    "GPT, tp2": ("tp2", {}),
    "GPT, tp2 sp, float32 stream": ("tp2 sp", {"bf16": True, "fp32_residual_connection": True}),
    "GPT, tp2 sp, bf16": ("tp2 sp", {"bf16": True}),
    "cp2": ("cp2", LLAMA),
    "cp2, gathered keys": ("cp2", LLAMA | {"cp_comm_type": ("all_gather",)}),
    "cp2, exchanged heads": ("cp2", LLAMA | {"cp_comm_type": ("a2a",)}),
    **{layout: (layout, LLAMA) for layout in ("dp4 zero1", "dp4 zero2", "dp4 zero3", "tp4 sp", "dp2 tp2 sp zero1")},
    **{layout: (layout, LLAMA) for layout in ("pp2", "pp2 v2", "pp2 gpipe", "pp2 zb_h1", "pp2 zb_v", "tp2 pp2")},
}
DRAWN = CASES if WHOLE_MATRIX else {name: CASES[name] for name in ("Llama", "zero3", "pp2", "cp2")}


def _peak(config: RunConfig, folder: Path) -> tuple[int, int]:
    """Bytes of the first rank's buffers, and the maximal allocation of a step in addition to them."""
    run = set_up(config, World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cpu")))
    train_step(run)
    buffers = run.data_parallel.resident_bytes()
    state = sum(tensor.nbytes for _, named in run.optimizer.tensors() for tensor in named.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(run)
    path = folder / f"{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return buffers["weights"] + buffers["gradients"] + state, most


@pytest.mark.drawn(1)
@pytest.mark.skipif(unavailable_reason("rms_norm", "cpu", torch.bfloat16) is not None, reason="no native kernels")
@pytest.mark.parametrize(("layout", "settings"), DRAWN.values(), ids=DRAWN)
def test_peak_within_five_percent(layout: str, settings: dict[str, Any], tmp_path: Path) -> None:
    chosen = Layout.parse(layout)
    config = RunConfig.from_flat(SIZES | chosen.settings() | settings)
    state, most = run_ranks(chosen.world_size, _peak, config, tmp_path)[0]
    predicted = RankEstimate.of(config, chosen.world_size).bytes_by_kind
    del predicted["fragments"]  # counts the sizes of tensors, not memory kept by an allocator
    assert sum(predicted.values()) == pytest.approx(state + most, rel=0.05)
