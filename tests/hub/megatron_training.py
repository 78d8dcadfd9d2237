"""Trainings of Megatron Core itself on CPU ranks: steps, and checkpoints in its formats. Call in forked ranks only."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.megatron_peer import MEGATRON, import_megatron
from megatron_core.verify.ranks import run_ranks

VOCABULARY, LENGTH, BATCH, MICRO_BATCH = 64, 16, 4, 2
GPT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "max_position_embeddings": LENGTH,
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "swiglu": False,
}
LLAMA = GPT | {
    "ffn_hidden_size": 32,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": True,
}
DECOUPLED = GPT | {"decoupled_lr": 4e-2, "decoupled_min_lr": 2e-3}
MUP = LLAMA | {"use_mup": True, "mup_base_hidden_size": 8, "mup_embedding_mult": 3.0}
EXPERTS: dict[str, Any] = LLAMA | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
QUANTILES = EXPERTS | {
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_router_quantile_balancing_ema": 0.3,
}
CAPACITY = EXPERTS | {"moe_expert_capacity_factor": 0.9}
LATENT_EXPERTS = EXPERTS | {"moe_latent_size": 12, "moe_shared_expert_intermediate_size": 24}
MTP = LLAMA | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
REPEATED = MTP | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
AHEAD_OF_EXPERTS = EXPERTS | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
DENSE_FIRST = AHEAD_OF_EXPERTS | {"moe_layer_freq": [0, 1]}
GROWING_BATCH = LLAMA | {
    "step_batch_size_schedule": "0:2 128:4 256:8",  # after 8 and 16 sequences
    "global_batch_size": 2,  # which Megatron-LM then derives from the micro-batch
    "lr_decay_iters": None,
    "lr_warmup_iters": 0,
    "train_samples": 80,
    "lr_decay_samples": 80,
    "lr_warmup_samples": 20,
}
"""Megatron-LM's arguments of a batch that grows, with which schedules count samples."""
MLA = LLAMA | {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "num_query_groups": None,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "rope_type": "rope",
}
SPARSE = MLA | {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 32,  # with few heads, scores are often 0, of which Megatron Core may select other keys
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 6,
    "dsa_indexer_loss_coeff": 0.3,
    "dsa_indexer_use_sparse_loss": True,
    "dsa_indexer_rotate_activation": False,
}
NONE = {"num_query_groups": None, "ffn_hidden_size": None}
BLOCKS = (
    {"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 48}},
    {"attention": NONE | {"no_op": True}, "ffn": NONE | {"replace_with_linear": True}},
    {"attention": NONE | {"replace_with_linear": True}, "mlp": {"ffn_hidden_size": 16}},
    {"attention": NONE | {"no_op": True}, "mlp": NONE | {"no_op": True}},
    {"attention": NONE, "mlp": NONE},
)
HETEROGENEOUS = LLAMA | {
    "num_layers": len(BLOCKS),
    "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": BLOCKS}),
}
SCHEDULE: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 20,
    "lr_warmup_iters": 5,
    "lr_warmup_init": 0.0,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "train_iters": 20,
    "seed": 1234,
}
CONFIG = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "add_bias_linear"),
    *("normalization", "qk_layernorm", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_load_balancing_type"),
    *("moe_token_dispatcher_type", "mtp_num_layers", "mtp_loss_scaling_factor", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "moe_router_enable_expert_bias"),
    *("moe_router_score_function", "moe_shared_expert_intermediate_size", "moe_router_bias_update_rate"),
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("mtp_use_repeated_layer", "experimental_attention_variant", "linear_attention_freq", "attention_output_gate"),
    *("moe_shared_expert_gate", "moe_latent_size", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_indexer_rotate_activation"),
    *("moe_expert_capacity_factor", "use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
    *("mup_embedding_mult", "mup_output_mult", "moe_router_quantile_balancing_ema"),
    *("heterogeneous_layers_config_encoded_json", "moe_layer_freq", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
)
DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Arguments of documents that end with the last token of the vocabulary."""
SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
SIZES |= {"etp": "expert_tensor_parallel_size"}


def tokens_of(iteration: int) -> Tensor:
    """The tokens of an iteration, counted from 1: [batch, length + 1]."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def arguments_of(
    shape: dict[str, Any],
    sizes: dict[str, int],
    *,
    tokens: int = VOCABULARY,
    distributed: bool = False,
    bf16: bool = False,
    fp16: bool = False,
    micro_batch: int = MICRO_BATCH,
) -> argparse.Namespace:
    """The arguments of a training, with the values that Megatron-LM derives."""
    derived = {"start_weight_decay": SCHEDULE["weight_decay"], "end_weight_decay": SCHEDULE["weight_decay"]}
    vocabulary = {"vocab_size": tokens, "padded_vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 8}
    batch = {"seq_length": LENGTH, "micro_batch_size": micro_batch, "global_batch_size": BATCH}
    default = dict.fromkeys(SIZES.values(), 1) | {"num_experts": None, "num_query_groups": None}
    rest: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_gelu_fusion": False}
    rest |= {"bf16": bf16, "fp16": fp16, "use_distributed_optimizer": distributed}
    default[SIZES["etp"]] = sizes.get(SIZES["tp"], 1)
    found = default | SCHEDULE | derived | vocabulary | batch | shape | rest | sizes
    return argparse.Namespace(**found, weight_decay_incr_style="constant", consumed_train_samples=0)


def use_megatron() -> None:
    """Make Megatron Core usable in this forked rank."""
    load_megatron()
    _use_gloo()


def _use_gloo() -> None:
    from tests.hub.megatron_0_20 import make_files

    make_files.patch_distributed()
    # Results of writers stay in this process: the process of Megatron's own queue would outlive the rank.
    results: Any = queue.Queue()
    asynchronous: Any = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    asynchronous.get_write_results_queue = lambda *args: results


def load_megatron() -> None:
    """Import Megatron Core in this forked process, before it joins other ranks."""
    from tests.hub.megatron_0_20 import make_files

    torch.set_num_threads(1)
    import_megatron(MEGATRON)
    cuda: Any = torch.cuda
    streams = cuda.Stream, cuda.current_stream  # with events, for which the dispatcher of experts waits
    make_files.patch_cuda()
    cuda.Stream, cuda.current_stream = streams
    make_files.patch_tensors()
    experts: Any = import_module("megatron.core.transformer.moe.moe_layer")
    experts.HAVE_TE, experts.TELinear = True, Replicated  # for the projections of latents
    tracker: Any = import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
    tracker.fork = lambda *a: nullcontext()  # without dropout no random numbers are drawn
    attention: Any = import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    attention.__init__ = partialmethod(_without_channels, attention.__init__)
    optimizer: Any = import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    optimizer._set_main_param_and_optimizer_states = partialmethod(
        _without_step, optimizer._set_main_param_and_optimizer_states
    )


def ranks_of_megatron(load: Callable[[], None], calls: dict[int, tuple[Any, ...]]) -> dict[int, list[Any]]:
    """The results of ``function(*args)`` on each rank, for each ``number of ranks: (function, *args)``.

    ``load``, such as ``load_megatron``, takes 3 s: it runs once, in a process of which all ranks are forks.
    """
    import_module("torch._inductor.compile_fx")  # also inherited by the processes of later tests
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), load) as process:
        return {
            ranks: process.submit(run_ranks, ranks, _over_gloo, *call, backend="gloo").result()
            for ranks, call in calls.items()
        }


def _over_gloo(function: Callable[..., Any], *args: Any) -> Any:
    _use_gloo()
    return function(*args)


class Replicated(nn.Module):
    """Transformer Engine's linear layer with ``parallel_mode="duplicated"``, without a bias."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, bias: bool, **_: Any) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        init_method(self.weight)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs] and no bias."""
        return nn.functional.linear(x, self.weight), None


def _without_step(self: Any, assign: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    """Assign Adam's state, of which torch's Adam has "step" among the tensors and Transformer Engine's has not."""
    assign(self, parameter, {"step": None, **tensors})


def _without_channels(
    self: Any, make: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
) -> None:
    """Construct the attention without Transformer Engine, which reads the channels of latent attention from tensors."""
    make(self, *args, **kwargs)


class Training:
    """A model of Megatron Core with its optimizer and schedule.

    ``layout``: ``tp2``, ``pp2``, ``ep2``, ``etp1``; ``vocabulary``: its size in the arguments; ``data``: an iteration's
    tokens.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        layout: str = "",
        *,
        distributed: bool = False,
        bf16: bool = False,
        fp16: bool = False,
        chunks: int = 1,
        vocabulary: int = VOCABULARY,
        micro_batch: int = MICRO_BATCH,
        data: Callable[[int], Tensor] = tokens_of,
    ) -> None:
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_mup_config_overrides,
            get_standard_config_overrides,
        )
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.shape, self.iteration, self.distributed, self.data = shape, 0, distributed, data
        torch.manual_seed(SCHEDULE["seed"])  # otherwise weights, and near ties of experts, depend on earlier tests
        sizes = {SIZES[word.rstrip("0123456789")]: int(word.lstrip("etp")) for word in layout.split()}
        virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
        ahead: Any = import_module("megatron.core.transformer.multi_token_prediction")
        ahead.MTPLossLoggingHelper.tracker.clear()  # which has the number of predictions of an earlier model
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, **virtual)
        self.args = arguments_of(
            shape, sizes, tokens=vocabulary, distributed=distributed, bf16=bf16, fp16=fp16, micro_batch=micro_batch
        )
        schedule = shape.get("step_batch_size_schedule")
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=dist.get_rank(),
            global_batch_size=None if schedule else BATCH,
            micro_batch_size=micro_batch,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            step_batch_size_schedule=schedule,
            seq_length=LENGTH,
        )
        self.config = self._transformer_config(sizes | virtual)
        self.chunks = [self._model(chunk if chunks > 1 else None) for chunk in range(chunks)]
        names = ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
        settings = {name: SCHEDULE[name] for name in names}
        precision = {"bf16": bf16, "fp16": fp16, "params_dtype": self.config.params_dtype}
        names = ("decoupled_lr", "decoupled_min_lr", "initial_loss_scale")
        settings |= {name: shape[name] for name in names if name in shape}
        of_optimizer = OptimizerConfig(use_distributed_optimizer=distributed, **settings, **precision)
        overrides = get_standard_config_overrides(of_optimizer)
        if shape.get("use_mup"):
            overrides |= get_mup_config_overrides(of_optimizer, self.config.mup_width_mult)
        self.optimizer = get_megatron_optimizer(of_optimizer, self.chunks, overrides)
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=SCHEDULE["lr_warmup_init"],
            max_lr=SCHEDULE["lr"],
            min_lr=SCHEDULE["min_lr"],
            lr_warmup_steps=SCHEDULE["lr_warmup_iters"] * BATCH,
            lr_decay_steps=SCHEDULE["lr_decay_iters"] * BATCH,
            lr_decay_style=SCHEDULE["lr_decay_style"],
            start_wd=SCHEDULE["weight_decay"],
            end_wd=SCHEDULE["weight_decay"],
            wd_incr_steps=SCHEDULE["train_iters"] * BATCH,
            wd_incr_style="constant",
        )

    def _transformer_config(self, sizes: dict[str, int]) -> Any:
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

        shape = self.shape
        is_sparse = shape.get("experimental_attention_variant") == "dsa"
        kind = MLATransformerConfig if shape.get("multi_latent_attention") else TransformerConfig
        if "heterogeneous_layers_config_encoded_json" in shape:
            heterogeneous: Any = import_module("megatron.core.transformer.heterogeneous.heterogeneous_config")
            kind = heterogeneous.HeterogeneousTransformerConfig
        given = {name: shape[name] for name in CONFIG if shape.get(name) is not None}
        if "hybrid_layer_pattern" in shape:
            given |= {"is_hybrid_model": True, "use_mamba_mem_eff_path": False}
        bf16, fp16 = self.args.bf16, self.args.fp16
        dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
        return kind(
            **given,
            **sizes,
            num_moe_experts=shape.get("num_experts"),
            deterministic_mode="linear_conv_kernel_dim" in shape,
            layernorm_zero_centered_gamma=shape.get("apply_layernorm_1p", False),
            gated_linear_unit=shape["swiglu"],
            activation_func=nn.functional.silu if shape["swiglu"] else nn.functional.gelu,
            sequence_parallel=sizes.get(SIZES["tp"], 1) > 1 and ("num_experts" in shape or is_sparse),
            transformer_impl="local" if is_sparse else "transformer_engine",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bf16=bf16,
            fp16=fp16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            deallocate_pipeline_outputs=True,
            layernorm_epsilon=1e-5,
        )

    def _model(self, chunk: int | None) -> nn.Module:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        shape = self.shape
        stage: dict[str, Any] = {"vp_stage": chunk}
        for name in ("first", "last"):
            is_end = getattr(parallel_state, f"is_pipeline_{name}_stage")(ignore_virtual=False, vp_stage=chunk)
            stage["pre_process" if name == "first" else "post_process"] = is_end
        model = self._hybrid(stage) if "hybrid_layer_pattern" in shape else self._gpt(stage)
        if self.args.bf16 or self.args.fp16:
            model = Float16Module(self.config, model)
        reduces = DistributedDataParallelConfig(
            use_distributed_optimizer=self.distributed, grad_reduce_in_fp32=self.args.bf16 or self.args.fp16
        )
        return DistributedDataParallel(self.config, reduces, model)

    def _hybrid(self, stage: dict[str, Any]) -> nn.Module:
        from tests.hub.megatron_hybrid import hybrid_model

        return hybrid_model(self.config, self.shape, **stage)

    def _gpt(self, stage: dict[str, Any]) -> nn.Module:
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs

        shape = self.shape
        spec: Any = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=shape.get("num_experts"),
            qk_layernorm=shape.get("qk_layernorm", False),
            multi_latent_attention=shape.get("multi_latent_attention", False),
            normalization=shape.get("normalization"),
        )
        if shape.get("experimental_attention_variant"):
            from tests.hub.megatron_hybrid import block_of_variant

            spec = block_of_variant(self.config, spec, stage["vp_stage"])
        if "moe_layer_freq" in shape:
            block: Any = gpt_layer_specs.get_gpt_decoder_block_spec
            spec = block(self.config, use_transformer_engine=False, vp_stage=stage["vp_stage"])
        if "heterogeneous_layers_config_encoded_json" in shape:
            module = "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs"
            spec = import_module(module).get_gpt_heterogeneous_layer_spec(self.config, vp_stage=stage["vp_stage"])
        mtp = None
        if shape.get("mtp_num_layers"):
            mtp = gpt_layer_specs.get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=False)
        model: nn.Module = GPTModel(
            self.config,
            spec,
            VOCABULARY,
            LENGTH,
            share_embeddings_and_output_weights=not shape["untie_embeddings_and_output_weights"],
            position_embedding_type=shape.get("position_embedding_type", "learned_absolute"),
            mtp_block_spec=mtp,
            **stage,
        )
        return model

    def step(self) -> float:
        """Take a step; return the mean over micro-batches of their mean losses, equal on all ranks."""
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.iteration += 1
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        micro_batch = self.args.micro_batch_size
        first = self.args.consumed_train_samples
        num_microbatches_calculator.update_num_microbatches(first, consistency_check=False)
        count = num_microbatches_calculator.get_num_microbatches()
        samples = range(first, first + count * micro_batch * size)
        rows = torch.stack([self.data(1 + number // BATCH)[number % BATCH] for number in samples])
        batches = rows.view(count, size, micro_batch, LENGTH + 1)[:, rank]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.timers = None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def forward(data: Any, model: nn.Module) -> Any:
            batch = next(data)
            attention_mask, loss_mask, positions = self._masks_and_positions(batch[:, :-1])

            def loss_of(output: Tensor) -> Any:
                total, tokens = (output.float() * loss_mask).sum(), loss_mask.sum()
                # As Megatron-LM's log: the mean over the tokens, whatever the mean that is minimized.
                return total / tokens.clamp(min=1), {"sums": torch.stack([total.detach(), tokens])}

            mask = {"loss_mask": loss_mask} if self.shape.get("mtp_num_layers") else {}
            return model(batch[:, :-1], positions, attention_mask, labels=batch[:, 1:], **mask), loss_of

        several = len(self.chunks) > 1
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.chunks] if several else iter(batches),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=count,
            seq_length=LENGTH,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        updated, *_ = self.optimizer.step()
        self.schedule.step(increment=len(samples) * bool(updated))
        self.args.consumed_train_samples += len(samples)
        sums = torch.zeros(2)
        if not parallel_state.get_tensor_model_parallel_rank():
            sums += sum(report["sums"] for report in losses)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def _masks_and_positions(self, tokens: Tensor) -> list[Tensor | None]:
        """Megatron Core's masks of attention and of the loss, and its positions, of documents in tokens ``[b, s]``."""
        gpt_dataset: Any = import_module("megatron.core.datasets.gpt_dataset")
        switches = [self.shape.get(name, False) for name in (*DOCUMENTS, "reset_attention_mask")]
        divide = gpt_dataset._get_ltor_masks_and_position_ids
        divided = [divide(row, VOCABULARY - 1, *switches) for row in tokens]
        return [None if parts[0] is None else torch.stack(parts) for parts in zip(*divided, strict=True)]

    def state(self, sharding: str, *, is_loading: bool = False) -> dict[str, Any]:
        """The state to save or load with ``dist_checkpointing``, as Megatron-LM's training builds it."""
        metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if self.distributed:
            metadata["distrib_optim_sharding_type"] = sharding
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        state: dict[str, Any] = {"args": self.args, "checkpoint_version": 3.0, "iteration": self.iteration}
        for number, chunk in enumerate(self.chunks):
            key = f"model{number}" if len(self.chunks) > 1 else "model"
            state[key] = _bare(chunk).sharded_state_dict(metadata=metadata)
        models = {key: value for key, value in state.items() if key.startswith("model")}
        state["optimizer"] = self.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        return state | {"opt_param_scheduler": self.schedule.state_dict()}

    def save(self, folder: Path, sharding: str = "fully_reshardable") -> None:
        """Write a checkpoint with ``--ckpt-format torch_dist``."""
        from megatron.core import dist_checkpointing

        path = self._folder(folder)
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(self.state(sharding), str(path), content_metadata={"sharding": sharding})

    def save_rank_files(self, folder: Path) -> None:
        """Write a checkpoint with ``--ckpt-format torch``."""
        from megatron.core import parallel_state

        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        ep, several = parallel_state.get_expert_model_parallel_rank(), self.config.pipeline_model_parallel_size > 1
        name = f"mp_rank_{tp:02d}" + f"_{pp:03d}" * several
        name += f"_{ep:03d}" * (self.config.expert_model_parallel_size > 1)
        path = self._folder(folder) / name
        path.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"args": self.args, "checkpoint_version": 3.0, "iteration": self.iteration}
        for number, chunk in enumerate(self.chunks):
            key = f"model{number}" if len(self.chunks) > 1 else "model"
            state[key] = _bare(chunk).state_dict_for_save_checkpoint()
        state |= {"optimizer": self.optimizer.state_dict(), "opt_param_scheduler": self.schedule.state_dict()}
        if parallel_state.get_expert_data_parallel_rank() == 0:
            torch.save(state, path / "model_optim_rng.pt")
        if self.distributed:
            self.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
        dist.barrier()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of PyTorch; that of experts is another one."""
        return [each.optimizer for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def _begin_optimizer(self) -> None:
        """Make the state of Adam, without which Megatron Core's distributed optimizer cannot load on a CPU."""
        for inner in self._optimizers():
            parameters = [p for group in inner.param_groups for p in group["params"]]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            inner.step()
            for parameter in parameters:
                parameter.grad = None

    def _folder(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))
        return folder / f"iter_{self.iteration:07d}"

    def load(self, folder: Path, sharding: str = "fully_reshardable") -> None:
        """Load a checkpoint in the format ``torch_dist``, as Megatron-LM's training does."""
        from megatron.core import dist_checkpointing
        from megatron.core.safe_globals import register_safe_globals

        register_safe_globals()
        self._begin_optimizer()
        found = dist_checkpointing.load(self.state(sharding, is_loading=True), str(folder))
        for number, chunk in enumerate(self.chunks):
            _bare(chunk).load_state_dict(found[f"model{number}" if len(self.chunks) > 1 else "model"])
        self.optimizer.load_state_dict(found["optimizer"])
        for state in (state for inner in self._optimizers() for state in inner.state.values()):
            state["step"] = state["step"].clone()  # one tensor for all, which torch's Adam would count up for each
        self.schedule.load_state_dict(found["opt_param_scheduler"])
        self.iteration = found["iteration"]
        self.args.consumed_train_samples = found["args"].consumed_train_samples


def _bare(chunk: Any) -> Any:
    """The model without its wrappers."""
    inner = chunk.module
    return inner.module if type(inner).__name__ == "Float16Module" else inner
