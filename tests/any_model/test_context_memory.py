"""Memory of activations with context parallelism: it falls with the number of ranks."""

from __future__ import annotations

import torch
import transformers

import megatron_core
from megatron_core.verify.ranks import run_ranks
from tests.memory import needs_proc, resident, start_anew

LENGTH = 4096


def _growth() -> float:
    """MiB that the second step adds to the resident memory of this rank, at its peak."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=LENGTH, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    engine = megatron_core.initialize(model, {"context_parallel_size": ranks, "micro_batch_size": 1}).engine
    tokens = torch.randint(512, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    before = 0
    for _ in range(2):
        start_anew()
        before = resident("VmRSS")
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return (resident("VmHWM") - before) / 2**20


@needs_proc
def test_memory_falls_with_the_ranks() -> None:
    alone, *_ = run_ranks(1, _growth)
    halves = run_ranks(2, _growth)
    quarters = run_ranks(4, _growth)
    assert max(halves) < 0.65 * alone, (alone, halves)
    assert max(quarters) < 0.4 * alone, (alone, quarters)
