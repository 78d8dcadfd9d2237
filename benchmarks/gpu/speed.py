"""Speed and memory of a model's training steps on one GPU.

    python -m benchmarks.gpu.speed "gpt 1b"

``mfu`` is relative to the GPU's data sheet, ``of_products`` to the fastest matrix product measured in the same process,
``of_planner`` to the rate in ``megatron_core/planner/machines``, which is what steps of published runs reach. FP8 runs
are relative to the same bfloat16 rates in the first two, so that all lines compare.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import arguments, skip, write_figures
from benchmarks.gpu.stages import SHAPES
from benchmarks.gpu.training import LATENT, TINY, world_on
from megatron_core.config import RunConfig
from megatron_core.config.flops import flops_per_token
from megatron_core.features.fp8.rules import block_size
from megatron_core.features.fp8.scaled_product import scaled_product_unavailable_reason
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.parallel.exit_status import allocation_that_failed
from megatron_core.parallel.initialization import draws_alike
from megatron_core.planner.explain import predicted_bytes
from megatron_core.planner.hardware import known_hardware, read_hardware
from megatron_core.reports.reference_rate import measure_product_rate
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step

WARM_UPS, STEPS = 3, 8
OnStep = Callable[[Run, list[float]], None]
SHEET = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}
"""FLOP/s of dense products in bfloat16 by NVIDIA's data sheets, of the SXM modules."""
COMMON: dict[str, Any] = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mock_data": True,
    "bf16": True, "lr": 1e-4, "eval_iters": 0, "train_iters": 1000, "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "linear",
}  # fmt: skip
GPT = {
    "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 4, "seq_length": 2048,
    "vocab_size": 50304, "micro_batch_size": 8,
}  # fmt: skip
LLAMA = {
    "num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336,
    "seq_length": 8192, "vocab_size": 128256, "rotary_base": 500000.0, "micro_batch_size": 2,
}  # fmt: skip
MIXTRAL = {
    "num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336,
    "num_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01, "seq_length": 4096, "vocab_size": 32000,
    "micro_batch_size": 4,
}  # fmt: skip
MLA = LATENT | {
    "num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 8192, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": False,
    "seq_length": 4096, "vocab_size": 102400, "micro_batch_size": 4,
}  # fmt: skip
FP8 = {"fp8_format": "hybrid", "fp8_recipe": "rowwise"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt 1b": GPT,
    "gpt 1b fp8": GPT | FP8,
    "llama 8b, 8 layers": LLAMA,
    "llama 8b, 8 layers, fp8": LLAMA | FP8,
    "mixtral, 2 layers": MIXTRAL,
    "latent attention": MLA,
    "latent attention fp8": MLA | FP8,
    "gpt 1b compiled": GPT | {"compile": True},
    "llama 8b, 8 layers, compiled": LLAMA | {"compile": True},
    "gpt 1b, cuda graphs": GPT | {"cuda_graph_impl": "local"},
    "llama 8b, 8 layers, cuda graphs": LLAMA | {"cuda_graph_impl": "local"},
    "mixtral, 2 layers, fp8": MIXTRAL | {"fp8_format": "e4m3", "fp8_recipe": "rowwise"},
    "gpt 1b, window, bounded scores": GPT | {"window_size": (511, 0), "attn_logit_softcapping": 30.0},
}


def machine_of(gpu: str) -> str | None:
    """The planner's machine for a GPU's name; None if it has none."""
    words = gpu.lower().replace("-", " ").split()
    return next((name for name in known_hardware() if name in words), None)


def settings_of(name: str, device: str, micro_batch: int | None = None) -> dict[str, Any]:
    """The settings of a model; with ``cpu`` a tiny one."""
    settings = COMMON | MODELS[name]
    if device == "cpu":
        small = TINY | {"vocab_size": 128, "micro_batch_size": 2, "num_query_groups": 2}
        settings |= small | (LATENT if "multi_latent_attention" in settings else {})
    size = micro_batch or settings["micro_batch_size"]
    return settings | {"micro_batch_size": size, "global_batch_size": size}


def step_seconds(run: Run, device: str, on_step: OnStep = lambda run, seconds: None) -> list[float]:
    """Seconds of each step after the warm-up; ``on_step`` is called with those so far."""
    seconds: list[float] = []
    for _ in range(WARM_UPS + STEPS):
        began = time.perf_counter()
        train_step(run)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if len(seconds) > WARM_UPS:
            on_step(run, seconds[WARM_UPS:])
    return seconds[WARM_UPS:]


def predicted_size(name: str, device: str, free: float) -> tuple[int, list[int]]:
    """The largest micro-batch whose predicted memory fits into ``free`` bytes, at least 1, and the larger ones."""
    size = settings_of(name, device)["micro_batch_size"]
    refused: list[int] = []
    while size > 1:
        config = RunConfig.from_flat(settings_of(name, device, size))
        needed = predicted_bytes(config, 1, int(settings_of(name, device)["vocab_size"]))
        if needed <= free:
            break
        print(f"{name}: --micro-batch-size {size} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
        refused.append(size)
        size //= 2
    return size, refused


def largest_that_fits(
    name: str, device: str, on_step: OnStep = lambda run, seconds: None
) -> tuple[Run, list[float], list[int]]:
    """Measure; halve the micro-batch while memory would or does run out. Returns the sizes that did not fit, too."""
    # Running out of memory costs a set-up, and on a device that others use too it would be their failure.
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else math.inf
    size, refused = predicted_size(name, device, free)
    while True:
        try:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            run = set_up(RunConfig.from_flat(settings_of(name, device, size)), world_on(device))
            return run, step_seconds(run, device, on_step), refused
        except Exception as error:
            if size == 1 or allocation_that_failed(error) is None:
                raise
        # Outside of the handler, whose traceback keeps the tensors of the step.
        run = None  # type: ignore[assignment]
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        refused, size = [*refused, size], size // 2
        print(f"{name}: out of memory with --micro-batch-size {refused[-1]}; trying {size}", flush=True)


def rates(device: str) -> dict[str, float | None]:
    """FLOP/s to compare with, by the name of the figure; None if unknown."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    machine, is_card = machine_of(name), any(kind in name.lower() for kind in ("pcie", "nvl"))
    return {
        "mfu": None if machine is None or is_card else SHEET.get(machine),
        "of_products": measure_product_rate(torch.device(device), dtype),
        "of_planner": read_hardware(machine).flops("bfloat16") if machine else None,
    }


def figures_of(run: Run, seconds: list[float], device: str, reference: dict[str, float | None]) -> dict[str, Any]:
    """The figures of the steps so far."""
    settings = run.config
    tokens = settings.training.micro_batch_size * settings.data.seq_length
    per_second = tokens / statistics.median(seconds)
    flops = per_second * flops_per_token(settings.model, settings.data.seq_length, run.vocab_size)
    products = reference["of_products"]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parameters": sum(p.numel() for stage in run.stages.values() for p in stage.parameters()),
        "tokens_per_second": per_second,
        "tflops": flops / 1e12,
        **{figure: flops / rate if rate else None for figure, rate in reference.items()},
        "product_tflops": products / 1e12 if products else None,
        "memory_gib": peak_memory_bytes() / 2**30,
        "micro_batch_size": settings.training.micro_batch_size,
        "seq_length": settings.data.seq_length,
        "step_seconds": seconds,
        # False: large weights were drawn on the CPU, which takes minutes.
        "draws_weights": device == "cuda" and draws_alike(run.world.device),
    }


def measure(name: str, device: str, out: Path | None = None) -> dict[str, Any]:
    """The figures of one model; those of the steps so far are stored in ``out`` after each step."""
    reference = rates(device)

    def keep(run: Run, seconds: list[float]) -> None:
        if out is not None:
            write_figures(out, figures_of(run, seconds, device, reference) | {"steps": len(seconds)}, shows=False)
        print(f"step {len(seconds)} of {STEPS}: {seconds[-1]:.4f} s", flush=True)

    run, seconds, refused = largest_that_fits(name, device, keep)
    return figures_of(run, seconds, device, reference) | {"out_of_memory": refused}


def main() -> int:
    """Measure one model."""
    given = arguments("shape")
    if given.shape not in SHAPES:
        print(f"shape {given.shape!r} is not known; legal: {', '.join(SHAPES)}")
        return 1
    settings = RunConfig.from_flat(settings_of(given.shape, given.device)).training
    if settings.fp8_format is not None and given.device == "cuda":
        reason = scaled_product_unavailable_reason(block_size(settings), torch.device("cuda", 0))
        if reason is not None:
            skip(given.out, f"FP8 would not be faster than bfloat16 here: {reason}")
    write_figures(given.out, measure(given.shape, given.device, given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
