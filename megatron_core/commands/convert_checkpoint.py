"""Convert a checkpoint of Hugging Face, Megatron-LM, DeepSpeed or this project, on a CPU, tensor by tensor.

megatron-convert --from hf --to native --load SmolLM2-135M --save runs/smollm

megatron-convert --from native --to hf --load runs/smollm --save smollm-continued

megatron-convert --from native --to peft --load runs/adapters --save adapter

megatron-convert --from megatron --to hf --load megatron-checkpoints --save continued

megatron-convert --from deepspeed --to native --load deepspeed-checkpoints --save runs/continued
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("convert_checkpoint")

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.locations import location
from megatron_core.output_file import refuse_url
from megatron_core.terminal import parse_flags

if TYPE_CHECKING:
    import torch

    from megatron_core.hub.megatron_lm.writer import Format

TARGETS = ("tensor-parallel-size", "pipeline-parallel-size", "expert-parallel-size", "expert-tensor-parallel-size")
FORMATS: "dict[str, Format]" = {"megatron": "torch_dist", "torch_dcp": "torch_dcp"}
"""Value of --to -> the format of a folder of torch.distributed.checkpoint."""
MEGATRON = {"--loader", "--saver", "--load-dir", "--save-dir", *(f"--target-{name}" for name in TARGETS)}
"""Flags of Megatron-LM's tools/checkpoint/convert.py and of its forks."""
CONVERSIONS = {
    "ckpt_step": (("native", "megatron"), ("hf", "native", "peft", *FORMATS)),
    "tag": (("deepspeed",), ("hf", "native")),
    "hf_config": (("deepspeed",), ("hf",)),
    "model_type": (("native", "megatron"), ("hf",)),
    "dtype": (("hf", "megatron", "deepspeed", "native"), ("hf", "native")),
    "optimizer": (("megatron", "deepspeed"), ("native",)),
    "average": (("native",), ("hf",)),
}
"""Flag -> the values of --from and --to with which it has an effect."""


@dataclass(frozen=True, kw_only=True)
class ConvertFlags:
    """Convert a checkpoint, and compare the logits of both sides on fixed prompts."""

    source: Annotated[Literal["hf", "megatron", "deepspeed", "native"], tyro.conf.arg(name="from")]
    """Format of --load: a folder of Hugging Face, a --save folder of Megatron-LM (--ckpt-format torch or torch_dist),
    a folder of DeepSpeed's save_checkpoint or its universal format, or a --save folder of pretrain_gpt.py."""
    to: Literal["hf", "native", "peft", "megatron", "torch_dcp"]
    """Format of --save. From native, megatron writes torch_dist for Megatron Core, and torch_dcp writes tensors for
    torch.distributed.checkpoint. peft: low-rank adapters of a native checkpoint; hf merges them with the frozen
    weights. From deepspeed, native is a checkpoint for Engine.load_checkpoint, and hf has the weights with their own
    names and config.json."""
    load: str
    """Folder to read; from native, or a URL such as s3://bucket/run."""
    save: str
    """Folder to write; it must be empty, or for native have no checkpoint. To native, or a URL."""
    ckpt_step: int | None = None
    """From native and megatron: the iteration to read; default: the latest."""
    tag: str | None = None
    """From deepspeed: the folder in --load to read, such as global_step500; default: the latest."""
    hf_config: str | None = None
    """From deepspeed to hf: the model's config.json or its folder; default: the one in --load."""
    model_type: str | None = None
    """To hf: the architecture, such as llama; default: that of the imported model, or the first that fits."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the written weights; default: that of the stored ones."""
    optimizer: bool | None = None
    """From megatron and deepspeed to native: read the optimizer's state, so that training continues at its iteration,
    or only the weights; default: the state if it can be read."""
    average: bool = False
    """From native to hf: the moving averages of --ema-decay instead of the weights."""
    verify: bool = True
    """Compare the logits of a Hugging Face folder with `transformers`, to peft with `peft`, from deepspeed names and
    shapes; if they differ, nothing is written."""


def convert_checkpoint(settings: ConvertFlags) -> str:
    """Convert; returns a line that describes the result."""
    import torch  # takes a second, which --help does not need

    from megatron_core.hub.adapter_export import export_adapter
    from megatron_core.hub.conversion import (
        export_distributed,
        export_hugging_face,
        import_hugging_face,
        import_megatron,
    )

    load = location(settings.load)
    save = location(settings.save)
    if settings.source != "native":
        refuse_url(f"--from {settings.source} --load {load}", load)
    if settings.to != "native":
        refuse_url(f"--to {settings.to} --save {save}", save)
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    if settings.source == settings.to:
        raise ConfigError(f"--from {settings.source} --to {settings.to}: nothing to convert; give two formats")
    _refuse_unused(settings)
    if settings.to in FORMATS:
        if settings.source != "native":
            raise ConfigError(f"--to {settings.to} needs --from native; convert to native first")
        summary = export_distributed(load, save, FORMATS[settings.to], step=settings.ckpt_step)
        return f"{load} -> {save}; {summary}"
    difference: float | None = None
    if settings.source == "deepspeed" and settings.to != "peft":
        return f"{load} -> {save} ({settings.to}); {convert_deepspeed(settings, load, save, dtype)}"
    if settings.source == "hf" and settings.to == "native":
        difference = import_hugging_face(load, save, dtype=dtype, verify=settings.verify)
    elif settings.to == "peft":
        if settings.source != "native":
            raise ConfigError(
                f"--from {settings.source} --to peft: adapters are in native checkpoints; use --from native"
            )
        difference = export_adapter(load, save, step=settings.ckpt_step, verify=settings.verify)
    elif settings.to == "native":
        imported = import_megatron(load, save, step=settings.ckpt_step, dtype=dtype, optimizer=settings.optimizer)
        return f"{load} -> {save} (native); {imported}; not verified"
    else:
        with native_folder(settings, load, save) as (native, step):
            difference = export_hugging_face(
                native,
                save,
                step=step,
                dtype=dtype,
                model_type=settings.model_type,
                verify=settings.verify,
                average=settings.average,
            )
    compared = settings.verify and difference is not None
    checked = f"logits differ by {difference:.1e} of the largest" if compared else "not verified"
    return f"{load} -> {save} ({settings.to}); {checked}"


def _refuse_unused(settings: ConvertFlags) -> None:
    """``ConfigError`` for a flag without effect in this conversion."""
    for name, (sources, targets) in CONVERSIONS.items():
        is_default = getattr(settings, name) is getattr(ConvertFlags, name)
        if not is_default and not (settings.source in sources and settings.to in targets):
            remedy = "give --tag" if name == "ckpt_step" and settings.source == "deepspeed" else "remove it"
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --from {settings.source} --to {settings.to}, only with "
                f"--from {', '.join(sources)} --to {', '.join(targets)}; {remedy}"
            )


def convert_deepspeed(settings: ConvertFlags, load: Path, save: Path, dtype: "torch.dtype | None") -> str:
    """Convert a checkpoint of DeepSpeed; returns a description."""
    from megatron_core.hub.deepspeed_conversion import export_deepspeed, import_deepspeed

    tag = settings.tag
    config = settings.hf_config
    if settings.to == "native":
        return import_deepspeed(load, save, tag=tag, dtype=dtype, optimizer=settings.optimizer)
    folder = None if config is None else Path(config)
    return export_deepspeed(load, save, tag=tag, dtype=dtype, hf_config=folder, verify=settings.verify)


@contextmanager
def native_folder(settings: ConvertFlags, load: Path, save: Path) -> Iterator[tuple[Path, int | None]]:
    """The checkpoint to export and its iteration: that of --load, or a temporary one next to --save."""
    if settings.source == "native":
        yield load, settings.ckpt_step
        return
    from megatron_core.hub.conversion import import_megatron

    save = save.absolute()
    try:
        save.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{save.name}.", dir=save.parent) as folder:
            import_megatron(load, Path(folder), step=settings.ckpt_step, optimizer=False)
            yield Path(folder), None
    except OSError as error:
        raise CheckpointError(f"{save.parent} cannot be written: {error}") from error


def main() -> None:
    """Parse the flags, convert and print the result."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers must not search for files on the network
    foreign = [word for word in sys.argv[1:] if word.split("=")[0].replace("_", "-") in MEGATRON]
    if foreign:
        raise ConfigError(
            f"{' '.join(foreign)}: flags of Megatron-LM's convert.py. Here: --from megatron (or hf) --to native "
            "(or hf) --load FOLDER --save FOLDER; every layout reads a native checkpoint, so no target layout is needed"
        )
    settings = parse_flags(ConvertFlags, description=__doc__)
    print(convert_checkpoint(settings))
