"""Make the checkpoints in ``checkpoints/`` with DeepSpeed itself, on two CPU processes.

PYTHONPATH=FOLDER_OF_DEEPSPEED DS_ACCELERATOR=cpu python tests/hub/deepspeed/make_checkpoints.py FOLDER [NAME ...]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from network import BATCH, LLAMA, STEPS_AFTER, STEPS_BEFORE, Network, batch, groups, tokens

RANKS = 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stage0_fp32": (0, "fp32", {}),
    "stage0_bf16": (0, "bf16", {}),
    "stage1_fp32": (1, "fp32", {}),
    "stage1_bf16": (1, "bf16", {"grad_accum": "fp32"}),
    "stage2_fp32": (2, "fp32", {"round_robin_gradients": True}),
    "stage2_bf16": (2, "bf16", OFFLOAD),
    "stage2_fp16": (2, "fp16", {}),
    "stage3_fp32": (3, "fp32", {"sub_group_size": 40}),
    "stage3_bf16": (3, "bf16", OFFLOAD),
}
"""Name -> ZeRO stage, dtype, further settings of zero_optimization."""
UNIVERSAL = ("stage1_fp32", "stage3_fp32")
"""Checkpoints that are also converted to DeepSpeed's universal format."""


def config_of(stage: int, dtype: str, further: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings."""
    found: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "zero_optimization": {"stage": stage, **further},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.01], "warmup_num_steps": 5}},
    }
    accumulated = found["zero_optimization"].pop("grad_accum", None)
    if accumulated is not None:
        found["data_types"] = {"grad_accum_dtype": accumulated}  # selects DeepSpeed's BF16_Optimizer
    if dtype != "fp32":
        found[dtype] = {"enabled": True} | ({"initial_scale_power": 8} if dtype == "fp16" else {})
    return found


def main(folder: Path, name: str) -> None:
    """Train, save, and train on for the expected losses."""
    import deepspeed

    if name not in CASES:
        return {"pipeline": pipeline, "autotp": tensor_parallel}[name](folder)
    stage, dtype, further = CASES[name]
    network = Network()
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(groups(network), lr=0.02, betas=(0.8, 0.9)),
        config=config_of(stage, dtype, further),
    )
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        inputs, targets = batch(step, dist.get_rank(), RANKS)
        loss = engine(inputs.to(kept), targets)
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(float(total) / RANKS)
        engine.backward(loss)
        engine.step()
        if step + 1 == STEPS_BEFORE:
            engine.save_checkpoint(str(folder), tag="step3", client_state={"epoch": 7, "names": ["a", "b"]})
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        expected: dict[str, Any] = {"losses": losses}
        if stage:
            with tempfile.TemporaryDirectory() as temporary:
                expected["state"] = convert(folder, Path(temporary))
                if name in UNIVERSAL:
                    shutil.copytree(temporary, folder.parent / f"{name}_universal", dirs_exist_ok=True)
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")
        for script in folder.rglob("*.py"):
            script.unlink()
    dist.barrier()


def pipeline(folder: Path) -> None:
    """Train a pipeline of two stages with a tied layer."""
    from torch import nn

    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(3)
    layers = [
        TiedLayerSpec("ends", nn.Linear, 5, 5),
        LayerSpec(nn.Linear, 5, 7),
        torch.tanh,
        LayerSpec(nn.Linear, 7, 5),
        TiedLayerSpec("ends", nn.Linear, 5, 5),
    ]
    network = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=0.02, betas=(0.8, 0.9)),
        config={
            **config_of(1, "fp32", {}),
            "train_micro_batch_size_per_gpu": BATCH,
            "scheduler": {},
            "gradient_clipping": 0.0,
        },
    )
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        generator = torch.Generator().manual_seed(100 + step)
        data = [torch.randn(BATCH, 5, generator=generator) for _ in range(2)]
        losses.append(float(engine.train_batch(iter([data]))))
        if step + 1 == STEPS_BEFORE:
            engine.save_checkpoint(str(folder), tag="step3")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "expected.json").write_text(json.dumps({"losses": losses}) + "\n")
        for script in folder.rglob("*.py"):
            script.unlink()
    dist.barrier()


def tensor_parallel(folder: Path) -> None:
    """Train a Llama whose layers AutoTP splits over two ranks."""
    import transformers

    import deepspeed

    torch.manual_seed(1)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    config = {**config_of(1, "fp32", {}), "train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
    config = {name: value for name, value in config.items() if name not in ("train_batch_size", "scheduler")}
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, betas=(0.8, 0.9))
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config={**config, "gradient_clipping": 0.0})
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        loss = engine(input_ids=tokens(), labels=tokens()).loss
        losses.append(float(loss))
        engine.backward(loss)
        engine.step()
        if step + 1 == STEPS_BEFORE:
            engine.save_checkpoint(str(folder), tag="step3")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "expected.json").write_text(json.dumps({"losses": losses}) + "\n")
        for script in folder.rglob("*.py"):
            script.unlink()
    dist.barrier()


def convert(folder: Path, out: Path) -> dict[str, dict[str, list[float]]]:
    """Convert to the universal format and to float32 weights with DeepSpeed's own programs; return the values."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    words = {"input_folder": str(folder / "step3"), "output_folder": str(out / "step3"), "num_extract_workers": 1}
    words |= {"num_merge_workers": 1, "keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(SimpleNamespace(**words))
    found: dict[str, dict[str, list[float]]] = {}
    for path in sorted(out.rglob("*.pt")):
        if path.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            value = torch.load(path, weights_only=False)
            value = value["param"] if isinstance(value, dict) else value
            found.setdefault(path.parent.name, {})[path.stem] = value.flatten().tolist()
    try:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), "step3")
    except ValueError:  # it cannot read files of BF16_Optimizer
        return found
    if folder.name == "stage2_fp32":  # with round_robin_gradients, ds_to_universal reads another order than was saved
        found = {}
    for name, weight in weights.items():
        found.setdefault(name, {})["fp32"] = weight.flatten().tolist()
    return found


def launch(folder: Path, names: list[str]) -> None:
    """Run ``main`` for all names in two processes."""
    running = []
    for rank in range(RANKS):
        settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": 29500 + os.getpid() % 1000}
        environment = {**os.environ, **{key: str(value) for key, value in settings.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment |= {"LOCAL_SIZE": str(RANKS)}
        command = [sys.executable, __file__, "--rank", str(folder), *names]
        running.append(subprocess.Popen(command, env=environment))
    if any([each.wait() for each in running]):
        raise SystemExit("DeepSpeed failed")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        import deepspeed

        # Without its own collectives for CPUs, which it would compile first.
        deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
        deepspeed.init_distributed("gloo", verbose=False)
        # DeepSpeed refuses float16 on a CPU, but torch computes it.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        for case in sys.argv[3:]:
            main(Path(sys.argv[2]) / case, case)
        dist.destroy_process_group()
    else:
        launch(Path(sys.argv[1]), sys.argv[2:] or [*CASES, "pipeline", "autotp"])
