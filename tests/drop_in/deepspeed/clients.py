"""Training with the Trainer of transformers and with accelerate, under the package ``deepspeed`` of a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.drop_in.deepspeed.compare import describe_ranks

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
STEPS, BATCH, MICRO = 6, 8, 2
"""Optimizer steps, samples of a step, and samples of a micro-batch."""
Losses = list[float]


def load() -> None:
    """Import the libraries, before ranks are forked: it takes seconds."""
    import accelerate.utils.deepspeed  # noqa: F401
    import transformers.integrations.deepspeed
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401


def use_package(folder: str | None) -> None:
    """Let ``import deepspeed`` find the package in ``folder``, and describe the ranks of torch.distributed to it."""
    if folder is not None:
        sys.path.insert(0, folder)
    describe_ranks()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if dist.get_world_size() > 1 and "megatron_core.drop_in" not in sys.modules:
        # With DeepSpeed, accelerate has a backend for GPUs only; without one it takes each rank for a whole job. The
        # drop-in replaces the same method, for programs that request DeepSpeed.
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.NO)


def check_package(model: Any, folder: str | None) -> None:
    """Raise unless ``model`` is an engine of the package in ``folder``: accelerate trains without it on request."""
    used = Path(sys.modules[type(model).__module__].__file__ or "")
    assert folder is None or Path(folder) in used.parents, f"{type(model)} of {used}"


def save_model(folder: str) -> None:
    """Save a Llama of two layers, whose weights all programs load: at stage 3 in another way."""
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)


def load_model(folder: str) -> Any:
    """Load it in float32, whatever the JSON says."""
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_samples(count: int = 64, length: int = 9) -> list[dict[str, Tensor]]:
    """Token ids and labels of the same length."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, SIZES["vocab_size"], (count, length), generator=draw)
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


def json_of(stage: int, **settings: Any) -> dict[str, Any]:
    """DeepSpeed's JSON with the ``auto`` values that transformers and accelerate fill."""
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,  # else save_model writes no weights at stage 3
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    return {**auto, **settings}


OPTIMIZER = {
    "type": "AdamW",
    "params": {"torch_adam": True, **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
}
RATES = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
SCHEDULER = {"type": "WarmupDecayLR", "params": dict.fromkeys(RATES, "auto")}
NAMED: dict[str, Any] = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "zero_force_ds_cpu_optimizer": False}
"""The JSON's own optimizer, which gets no parameter groups, and its own rates."""
BF16: dict[str, Any] = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
"""bfloat16 with gradients that are summed in float32, as the drop-in sums them in any case."""


def train_with_trainer(
    folder: str | None,
    model: str,
    output: str,
    config: dict[str, Any] | None,
    resume_from: int | None = None,
    recomputes: bool = False,
    ranks_of_a_sequence: int = 0,
) -> dict[str, Any]:
    """Losses, gradient norms, learning rates and evaluation losses of ``transformers.Trainer``; and whole weights.

    ``ranks_of_a_sequence``: ``sp_size`` of ``ParallelismConfig``, with sequences of 8 tokens; 0: of 9 tokens, without.
    """
    use_package(folder)
    import accelerate
    import transformers

    ranks = int(os.environ["WORLD_SIZE"]) // max(ranks_of_a_sequence, 1)
    sizes = {"sp_size": ranks_of_a_sequence, "dp_shard_size": ranks}
    split = {"parallelism_config": accelerate.ParallelismConfig(**sizes)} if ranks_of_a_sequence > 1 else {}
    is_bf16 = config is not None and config["bf16"]["enabled"] is True
    transformers.training_args.is_torch_bf16_gpu_available = lambda: is_bf16  # it asks for GPUs only
    arguments = transformers.TrainingArguments(
        bf16=is_bf16,
        output_dir=output,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        per_device_eval_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // (MICRO * ranks),
        gradient_checkpointing=recomputes,
        learning_rate=1e-2,
        weight_decay=0.1,
        adam_epsilon=1e-6,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        warmup_steps=2,
        logging_steps=1,
        save_steps=STEPS // 2,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        report_to=[],
        seed=5,
        deepspeed=config,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **split,
    )
    samples = make_samples(length=8 if ranks_of_a_sequence else 9)
    loaded = load_model(model)
    recomputed = count_calls(loaded.model.layers[0].mlp)
    trainer = transformers.Trainer(loaded, arguments, train_dataset=samples[:48], eval_dataset=samples[48:])
    trainer.train(resume_from_checkpoint=None if resume_from is None else f"{output}/checkpoint-{resume_from}")
    check_package(trainer.model_wrapped, folder)
    trainer.save_model(f"{output}/final")
    logs = trainer.state.log_history
    found: dict[str, Any] = {
        name: [entry[key] for entry in logs if key in entry]
        for name, key in (("losses", "loss"), ("norms", "grad_norm"), ("rates", "learning_rate"), ("eval", "eval_loss"))
    }
    found["recomputed"] = recomputed[0]
    if int(os.environ["RANK"]) == 0:
        found["weights"] = _weights_in(Path(output, "final"))
    return found


def train_prompts(folder: str | None, model: str, output: str, config: dict[str, Any] | None) -> Any:
    """The prompts of prefix tuning in the file that ``transformers.Trainer`` writes; None except on rank 0."""
    use_package(folder)
    import peft
    import transformers

    if config is not None:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(
        load_model(model), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    arguments = transformers.TrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // (MICRO * int(os.environ["WORLD_SIZE"])),
        learning_rate=1e-2,
        save_steps=2,
        report_to=[],
        deepspeed=config,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(adapted, arguments, train_dataset=make_samples())
    trainer.train()
    trainer.save_model(f"{output}/final")
    if int(os.environ["RANK"]):
        return None
    from safetensors.torch import load_file

    return load_file(f"{output}/final/adapter_model.safetensors")["prompt_embeddings"].numpy()


def count_calls(module: Any) -> list[int]:
    """The number of forwards of ``module`` during backward, in a list that grows with them."""
    found = [0]

    def count(*_: Any) -> None:
        found[0] += torch._C._current_graph_task_id() != -1

    module.register_forward_pre_hook(count)
    return found


def _weights_in(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    return {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def train_with_accelerate(
    folder: str | None, saved: str, stage: int | str | None, output: str | None = None
) -> dict[str, Any]:
    """Losses of a loop with accelerate, and gathered weights.

    ``stage``: of its plugin for DeepSpeed; ``"fsdp2"``: its plugin for FSDP; None: neither.
    """
    use_package(folder)
    import accelerate

    ranks = int(os.environ["WORLD_SIZE"])
    steps = BATCH // (MICRO * ranks)
    plugins: dict[str, Any] = {}
    if isinstance(stage, int):
        plugin = accelerate.DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=steps, gradient_clipping=0.5)
        # get_state_dict needs it at stage 3; as the environment variable ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL
        plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        plugins["deepspeed_plugin"] = plugin
    if stage == "fsdp2":
        plugins["fsdp_plugin"] = _fsdp_plugin()
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=steps, **plugins)
    model = load_model(saved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / ranks))
    samples: Any = make_samples()
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=MICRO)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if isinstance(stage, int):
        check_package(model, folder)
    losses: list[Losses] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    if output is not None:
        accelerator.save_state(output)
        _destroy_weights(accelerator, model)
        accelerator.load_state(output)
    state = accelerator.get_state_dict(model)
    means = [float(np.mean(losses[at : at + steps])) for at in range(0, len(losses), steps)]
    weights = {} if state is None else {name: tensor.float().cpu().numpy() for name, tensor in state.items()}
    return {"losses": means, "weights": weights}


def _fsdp_plugin() -> Any:
    """The plugin for FSDP2, on CPU ranks that accelerate takes for GPUs: it has FSDP for these only."""
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )


def _destroy_weights(accelerator: Any, model: Any) -> None:
    """Set all weights to zero, those split over ranks too, and check it."""
    import deepspeed

    parameters = list(accelerator.unwrap_model(model).parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    state = accelerator.get_state_dict(model)
    assert state is None or not any(tensor.any() for tensor in state.values()), "the weights are not destroyed"
