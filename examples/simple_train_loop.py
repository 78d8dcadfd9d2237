"""A custom training loop with Megatron Core's imports: groups, GPT, data, schedule, optimizer, checkpoint.

It follows Megatron-LM's tutorial (run_simple_mcore_train_loop.py) and runs on a CPU:

    torchrun --nproc-per-node 2 -m megatron_core.drop_in examples/simple_train_loop.py
    torchrun --nproc-per-node 4 -m megatron_core.drop_in examples/simple_train_loop.py --tensor 2 --pipeline 2
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE_LENGTH = 64
BATCH = 8
"""Number of sequences per step of all data-parallel ranks together, in two micro-batches."""


def initialize_distributed(tensor: int, pipeline: int) -> None:
    """Join the ranks started by torchrun, and split the model over them."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model_parallel_cuda_manual_seed(123)


def model_provider(dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    """This rank's stage of a GPT with two layers, whose gradients are averaged over data-parallel ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=SEQUENCE_LENGTH,
        max_sequence_length=SEQUENCE_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def get_train_data_iterator() -> Iterator[dict[str, Tensor]]:
    """Micro-batches of synthetic text, different on each data-parallel rank."""
    compile_helpers()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=SEQUENCE_LENGTH),
        mid_level_dataset_surplus=0.005,
    )
    dataset = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, None, None], lambda: True, config).build()[0]
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=False)
    return iter(DataLoader(dataset, batch_size=BATCH // 2 // size, sampler=sampler))


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """The model's output for the next micro-batch, and the function that computes its loss."""
    device = next(model.parameters()).device
    data = {name: tensor.to(device) for name, tensor in next(data_iterator).items()}
    output = model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
    return output, partial(loss_func, data["loss_mask"])


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of a micro-batch's unmasked tokens."""
    loss = torch.sum(output * loss_mask) / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def train(model: DistributedDataParallel, data: Iterator[Any], steps: int, optimizer: Any) -> list[float]:
    """Run training steps and return their losses, on ranks with the last stage."""
    run = get_forward_backward_func()
    size = BATCH // 2 // parallel_state.get_data_parallel_world_size()
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        reports = run(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=2,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=size,
        )
        finalize_model_grads([model])
        optimizer.step()
        if reports:
            loss = torch.stack([report["lm loss"] for report in reports]).mean()
            dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            history.append(float(loss) / parallel_state.get_data_parallel_world_size())
    return history


def main() -> None:
    """Train, save and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    given = parser.parse_args()
    initialize_distributed(given.tensor, given.pipeline)
    model = model_provider()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = train(model, get_train_data_iterator(), given.steps, optimizer)
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    folder = [os.path.join(tempfile.mkdtemp(), "checkpoint") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    path = str(folder[0])
    dist_checkpointing.save(model.sharded_state_dict(), path)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), path))
    if last:
        print(f"saved and loaded {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
