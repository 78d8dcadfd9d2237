"""Megatron Core: a step of its GPT with a public bug under tensor parallelism, compared with the same step on one rank.

``gathered_logits``: Megatron-LM issue 7452, finding 2; a model with ``parallel_output=False`` gives whole logits to the
loss over split vocabularies. ``label_smoothing``: finding 1; each rank smooths over its own part of the vocabulary.
``final_norm``: issue 1446; the gradient of the last norm is not summed over tensor-parallel ranks under sequence
parallelism. The first two are in Megatron Core 0.19.2 itself, the third is planted.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.megatron_peer import import_megatron
from megatron_core.verify import compare

VOCABULARY, LENGTH, SAMPLES = 64, 8, 2


class SmoothedLoss(nn.Module):
    """Megatron's cross entropy over split vocabularies, with label smoothing."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, for ``logits`` [b, s, v / tp]."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        losses: Tensor = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), labels.T.contiguous(), 0.1)
        return losses.T


class Program(nn.Module):
    """Megatron's model, followed by a loss."""

    def __init__(self, model: nn.Module, *, smoothed: bool) -> None:
        super().__init__()
        self.gpt, self.smoothed_loss = model, SmoothedLoss() if smoothed else None

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of each token [b, s]."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        if self.smoothed_loss is None:
            losses: Tensor = self.gpt(tokens, positions, None, labels=tokens)
            return losses
        smoothed: Tensor = self.smoothed_loss(self.gpt(tokens, positions, None), tokens)
        return smoothed


def step(folder: str, bug: str = "", package: str = "") -> list[str]:
    """One step of a GPT of Megatron Core in the folder ``package``, under tensor and sequence parallelism."""
    import_megatron(Path(package))
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    rank, size = dist.get_rank(), dist.get_world_size()
    tracker: Any = get_cuda_rng_tracker()
    tracker.fork = nullcontext  # without dropout no random numbers are drawn
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = _config(size)
    is_split = bug != "gathered_logits" or size == 1
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, parallel_output=is_split)
    if bug == "final_norm":
        for parameter in gpt.decoder.final_layernorm.parameters():
            vars(parameter)["sequence_parallel"] = False
    program: Any = Program(gpt, smoothed=bug == "label_smoothing")
    program.config = config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), program)
    watch = compare(program, folder, tp=(rank, size))
    torch.manual_seed(1)
    program(torch.randint(VOCABULARY, (SAMPLES, LENGTH))).mean().backward()
    finalize_model_grads([wrapped])
    watch.gradients(lambda parameter: parameter.main_grad)
    return watch.finish()


def _config(size: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=size,
        sequence_parallel=size > 1,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
