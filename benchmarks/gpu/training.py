"""A short training in one mode, compared with the same training on the CPU in float32.

Weights, data and dropout depend on the seed only, so that the losses of both differ by rounding alone.

    python -m benchmarks.gpu.training "fp8 rowwise"
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import arguments, skip, write_figures
from benchmarks.gpu.stages import MODES
from megatron_core import parallel_state
from megatron_core.config import RunConfig
from megatron_core.features.fp8.rules import block_size
from megatron_core.features.fp8.scaled_product import scaled_product_unavailable_reason
from megatron_core.inference import Generator, Request, Sampling, generate
from megatron_core.parallel import World
from megatron_core.training import pretrain
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step

STEPS = 8
SHAPE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 512,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 512,
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "init_method_std": 0.05,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "mock_data": True, "micro_batch_size": 2, "global_batch_size": 4,
    "train_iters": STEPS, "lr": 2e-3, "eval_iters": 0,
}  # fmt: skip
TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "seq_length": 32, "num_attention_heads": 2}
"""The shape with ``--device cpu``."""
TINY_BOUND = 0.2
"""Factor of the bounds of that shape."""
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "moe_aux_loss_coeff": 0.01}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16, "v_head_dim": 32, "qk_layernorm": True,
}  # fmt: skip
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
BOUNDED = {"attn_logit_softcapping": 5.0}
BF16 = {"bf16": True}


@dataclass(frozen=True)
class Mode:
    """Settings that the training on the device has in addition, and the bound of its losses' relative difference.

    Each bound is three to thirty times what the same mode differs by on a CPU, because a GPU sums in another order. A
    model of the shape ``TINY`` differs by less, and its losses fall by less.
    """

    own: dict[str, Any]
    bound: float
    both: dict[str, Any] = field(default_factory=dict)
    """Settings that change the model or the updates: of the reference, too."""


def fp8(recipe: str) -> Mode:
    """A recipe of FP8 with activations in bfloat16."""
    return Mode(BF16 | {"fp8_format": "hybrid", "fp8_recipe": recipe}, 2e-2)


PLAIN: dict[str, Mode] = {
    "float32": Mode({}, 1e-4),
    "bf16": Mode(BF16, 5e-3),
    "fp16": Mode({"fp16": True, "initial_loss_scale": 2.0**12}, 2e-3),
    **{f"fp8 {recipe}": fp8(recipe) for recipe in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")},
    "recompute": Mode(
        BF16 | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 5e-3
    ),
    "activation offload": Mode(BF16 | {"cpu_offloading": True, "cpu_offloading_num_layers": 1}, 5e-3),
    "optimizer offload": Mode(BF16 | {"optimizer_cpu_offload": True}, 5e-3),
    "muon": Mode(BF16, 2e-2, {"optimizer": "muon"}),
    "attention dropout": Mode(BF16, 5e-3, {"attention_dropout": 0.1}),
    "packed documents": Mode(BF16, 5e-3, PACKED),
    "experts": Mode(BF16, 1e-2, EXPERTS),
    "experts fp8": Mode(BF16 | {"fp8_format": "e4m3", "fp8_recipe": "rowwise"}, 2e-2, EXPERTS),
    "window, bounded scores": Mode(BF16, 5e-3, BOUNDED | {"window_size": (20, 0)}),
    "packed documents, bounded scores": Mode(BF16, 5e-3, BOUNDED | PACKED),
    "latent attention": Mode(BF16, 5e-3, LATENT),
    "fused loss": Mode(BF16 | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}, 5e-3),
    "zero 1": Mode(BF16 | {"zero_stage": 1}, 5e-3),
    "zero 3": Mode(BF16 | {"zero_stage": 3}, 5e-3),
    "compiled": Mode(BF16 | {"compile": True}, 5e-3),
    "cuda graphs": Mode(BF16 | {"cuda_graph_impl": "local"}, 5e-3),
}


def world_on(device: str) -> World:
    """One rank on a device."""
    parallel_state.destroy_model_parallel()
    if device == "cuda":
        torch.cuda.set_device(0)
        return World(0, 1, 0, torch.device("cuda", 0))
    return World(0, 1, 0, torch.device("cpu"))


def losses_on(device: str, settings: dict[str, Any]) -> list[float]:
    """The loss of every step."""
    run = set_up(RunConfig.from_flat(settings), world_on(device))
    return [float(train_step(run).loss) for _ in range(STEPS)]


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two curves of losses; infinite if they differ in length or hold NaN."""
    if len(found) != len(expected) or not all(map(math.isfinite, [*found, *expected])):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def compared(found: list[float], expected: list[float], bound: float) -> dict[str, Any]:
    """The figures of a comparison; ``within`` is its outcome."""
    largest = difference(found, expected)
    falls = len(expected) > 1 and expected[-1] < expected[0]
    return {
        "largest_difference": largest,
        "bound": bound,
        "within": largest <= bound and falls,
        "losses": found,
        "reference": expected,
    }


def plain(name: str, device: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A mode of the trainer against float32 on the CPU."""
    mode = PLAIN[name]
    expected = losses_on("cpu", shape | mode.both)
    settings = shape | mode.both | mode.own
    bound = mode.bound * (TINY_BOUND if shape["hidden_size"] == TINY["hidden_size"] else 1.0)
    figures = compared(losses_on(device, settings), expected, bound)
    if "fp8_recipe" in mode.own:
        reason = scaled_product_unavailable_reason(
            block_size(RunConfig.from_flat(settings).training), torch.device(device)
        )
        figures["products"] = f"dequantised matrices: {reason}" if reason else "torch's FP8 product"
    return figures


def any_model(stage: int, device: str) -> dict[str, Any]:
    """``initialize`` with a Llama of transformers in bfloat16, against torch's AdamW in float32 on the CPU."""
    import transformers

    import megatron_core

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    reference = transformers.LlamaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    batch = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    expected = []
    for _ in range(STEPS):
        loss = reference(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    settings = {
        "zero_stage": stage, "bf16": True, "micro_batch_size": 2, "global_batch_size": 2, "lr": 2e-3,
        "weight_decay": 0.01, "clip_grad": 0.0, "lr_decay_style": "constant",
    }  # fmt: skip
    parallel_state.destroy_model_parallel()
    engine = megatron_core.initialize(model, settings)[0]
    moved, found = batch.to(device), []
    for _ in range(STEPS):
        loss = engine(input_ids=moved, labels=moved).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    # Weights in bfloat16 differ by 0.0025 on a CPU; the loss falls by a third.
    return compared(found, expected, 1e-2)


def resumed(device: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A training resumed from its checkpoint, against one that was not interrupted."""
    # The rate is given, because measuring it takes time, and it is printed only.
    settings = shape | BF16 | {"lr_decay_iters": STEPS, "log_interval": 1, "peak_tflops": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        whole, parts, saved = (Path(folder, name) for name in ("whole.jsonl", "parts.jsonl", "checkpoints"))
        keep = {"save": str(saved), "save_interval": STEPS // 2, "metrics_file": str(parts)}
        runs = ({"metrics_file": str(whole)}, keep | {"train_iters": STEPS // 2}, keep | {"load": str(saved)})
        for own in runs:
            pretrain(RunConfig.from_flat(settings | own), world_on(device))
        expected, found = logged_losses(whole), logged_losses(parts)
    # Sums with atomic additions are not the same in every run on a GPU.
    return compared(found, expected, 1e-3 if device == "cuda" else 0.0)


def logged_losses(path: Path) -> list[float]:
    """The losses of a metrics file."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


def generated(device: str, shape: dict[str, Any]) -> list[int]:
    """Greedy tokens after a prompt."""
    run = set_up(RunConfig.from_flat(shape | {"init_method_std": 0.3}), world_on(device))
    for stage in run.stages.values():
        stage.eval()
    generator = Generator(run.config, run.groups, run.stages, len(run.layers), run.vocab_size, run.world.device)
    request = Request(prompt=(5, 11, 17), max_new_tokens=12, sampling=Sampling(temperature=0.0))
    return list(generate(generator, request))


def generation(device: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Greedy text in float32 against the CPU's, token by token."""
    expected, found = generated("cpu", shape), generated(device, shape)
    return {"within": found == expected and len(found) > 0, "tokens": found, "reference": expected}


def run_mode(name: str, device: str) -> dict[str, Any]:
    """The figures of one mode."""
    shape = SHAPE | (TINY if device == "cpu" else {})
    others: dict[str, Callable[[], dict[str, Any]]] = {
        "any model, zero 1": lambda: any_model(1, device),
        "any model, zero 3": lambda: any_model(3, device),
        "checkpoint": lambda: resumed(device, shape),
        "generation": lambda: generation(device, shape),
    }
    return others[name]() if name in others else plain(name, device, shape)


def main() -> int:
    """Run one mode; exit with 1 if it differs by more than its bound."""
    given = arguments("mode")
    if given.mode not in MODES:
        print(f"mode {given.mode!r} is not known; legal: {', '.join(MODES)}")
        return 1
    if given.mode.startswith("any model"):
        try:
            import transformers  # noqa: F401
        except ImportError:
            skip(given.out, "transformers is not installed; pip install 'transformers>=4.56,<6' (once, with a network)")
    figures = run_mode(given.mode, given.device)
    if given.device == "cuda":
        figures["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    write_figures(given.out, figures)
    return 0 if figures["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
