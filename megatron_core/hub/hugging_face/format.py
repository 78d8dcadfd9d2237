"""Folders of Hugging Face and PEFT that settings name: --load-hf, --lora-load, --load."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.checkpoint.formats import CheckpointFormat
from megatron_core.config import DataConfig, RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.hub.hugging_face.peft import CONFIG as ADAPTER
from megatron_core.hub.hugging_face.peft import adapter_settings, peft_names, read_adapter
from megatron_core.hub.hugging_face.reader import (
    CONFIG,
    HuggingFaceReader,
    config_of_folder,
    notes_of_folder,
    read_config_json,
)

OF_RESULT = ("lora_rank", "lora_alpha", "use_rslora", "use_dora")
"""Settings of adapters that change what stored ones compute."""


class HuggingFaceFormat(CheckpointFormat):
    """Models of Hugging Face, whose weights are initial weights."""

    is_openable = True

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has files of the format."""
        return (folder / CONFIG).is_file()

    def refusal(self, named: str, folder: Path, step: int | None = None) -> str:
        """The command that converts the folder."""
        # PEFT may store adapters next to the config.json of their model, and ``PeftFormat`` refuses such a folder.
        if (folder / ADAPTER).is_file() or not any(any(folder.glob(f"*{end}")) for end in (".safetensors", ".bin")):
            return ""
        source = shlex.quote(str(folder))
        target = shlex.quote(f"{folder.absolute()}-converted")
        return (
            f"{named} is a model of Hugging Face; give --load-hf {source}, or run megatron-convert --from hf --to "
            f"native --load {source} --save {target}, then give --load {target}"
        )

    def settings(self, folder: Path) -> dict[str, Any]:
        """Flat settings of a run that trains the stored model."""
        return config_of_folder(folder).flat()

    def open(self, root: Path, step: int | None = None, *, finetune: bool = False) -> HuggingFaceReader:
        """Open the weights."""
        return HuggingFaceReader(root)

    def notes(self, folder: Path, config: RunConfig) -> Iterator[str]:
        """Notes about parts that are not read, the length of sequences, and the balance of experts."""
        length = config.data.seq_length
        positions = config.model.max_position_embeddings or 0
        if length == DataConfig().seq_length < positions:
            yield (
                f"seq_length={length} is the default, and the model of load_hf={str(folder)!r} has {positions:,} "
                "positions; set the length of your sequences with --seq-length"
            )
        yield from _notes_on_balance(folder, config.model.section(MoEConfig))
        yield from notes_of_folder(folder, config.model)


class PeftFormat(CheckpointFormat):
    """Low-rank adapters of PEFT."""

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has files of the format."""
        return (folder / ADAPTER).is_file()

    def refusal(self, named: str, folder: Path, step: int | None = None) -> str:
        """The command that converts the folder."""
        return f"{named} has adapters of PEFT; give --lora-load {shlex.quote(str(folder))}"

    def settings(self, folder: Path) -> dict[str, Any]:
        """Flat settings of a run that trains the stored model."""
        return adapter_settings(folder)

    def read_added(self, folder: Path, config: RunConfig, vocab_size: int) -> dict[str, Tensor]:
        """All adapters of the model of ``config``; ``CheckpointError`` if they would compute something else in it."""
        stored = adapter_settings(folder)
        other = [name for name in OF_RESULT if config.value(name) != stored[name]]
        if other:
            trained = ", ".join(f"{name}={stored[name]}" for name in other)
            changed = ", ".join(f"{name}={config.value(name)}" for name in other)
            raise CheckpointError(
                f"the adapters in lora_load={str(folder)!r} were trained with {trained}, but this run has {changed}; "
                "remove these flags, because the adapters bring their settings"
            )
        names, shapes = peft_names(config, vocab_size)
        return read_adapter(folder, names, shapes)


def _notes_on_balance(folder: Path, experts: MoEConfig) -> Iterator[str]:
    """Notes about training that transformers does not do by default, and other frameworks do."""
    if not experts.num_experts:
        return
    hf_config = read_config_json(folder)
    coefficient = experts.moe_aux_loss_coeff
    if coefficient and coefficient == hf_config.get("router_aux_loss_coef"):
        is_on = str(bool(hf_config.get("output_router_logits"))).lower()
        yield (
            f"moe_aux_loss_coeff={coefficient} is the router_aux_loss_coef of config.json: training adds a balancing "
            "loss for each layer and sequence. transformers adds one of all layers together, and only with "
            f"output_router_logits=true (here {is_on}); --moe-aux-loss-coeff 0 trains without it"
        )
    if experts.moe_router_enable_expert_bias and experts.moe_router_bias_update_rate:
        yield (
            f"moe_router_bias_update_rate={experts.moe_router_bias_update_rate}: every step changes the biases by "
            "which experts are chosen. transformers leaves them unchanged, as --moe-router-bias-update-rate 0 does"
        )
