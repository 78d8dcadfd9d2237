"""Checkpoints of ``DeepSpeedEngine`` in our format, as ``save_dir/tag`` and ``latest``."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.utils import LATEST_UNIVERSAL
from deepspeed.client_state import decode, encode
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline.curriculum_sampler import CurriculumSampler
from deepspeed.runtime.engine_settings import EngineSettings
from deepspeed.runtime.rates import ProgramRates
from deepspeed.runtime.weights_file import write_weights
from deepspeed.runtime.zero.offload_states import StatePlacement
from deepspeed.utils.logging import logger
from megatron_core.any_model import Engine
from megatron_core.any_model.gated_experts import with_all_experts
from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed import is_deepspeed_folder
from megatron_core.output_file import make_folder
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import gather_from_all_ranks, raise_on_all_ranks

LATEST = "latest"
"""File with the tag of the newest checkpoint."""


class DifferentTags(CheckpointError, AssertionError):
    """The tag of a checkpoint differs between ranks; an ``AssertionError`` in DeepSpeed."""


class EngineCheckpoint(EngineSettings, StatePlacement):
    """Saving and loading of an engine; all ranks call each method together."""

    core: Engine
    module: nn.Module
    _rates: ProgramRates
    _config: DeepSpeedConfig
    global_steps: int
    micro_steps: int

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write weights, optimizer state, scheduler and counters into ``save_dir/tag``; return True.

        ``tag``: default ``global_stepN``. ``client_state``: values that ``load_checkpoint`` returns. Load a checkpoint
        with ``exclude_frozen_parameters`` with ``load_module_strict=False``. Errors: ``CheckpointError`` on all ranks,
        also if tags differ; ``ValueError`` if no folder.
        """
        if not save_dir:
            raise ValueError(f"save_dir={save_dir!r} must be a folder")
        name = self._check_tag(str(f"global_step{self.global_steps}" if tag is None else tag))
        within_step = self.core.micro_step, self.core._backwards
        if any(within_step):
            logger.warning("save_checkpoint in the middle of a step: the gradients of its micro-batches are not saved")
        self.core.micro_step = self.core._backwards = 0  # else the engine refuses to save
        try:
            self.core.save_checkpoint(
                Path(save_dir, name),
                {"state": encode(dict(client_state or {}))},
                trained_only=exclude_frozen_parameters,
            )
        finally:
            self.core.micro_step, self.core._backwards = within_step
        self.core.finish_saving()
        problem = ""
        if save_latest and self.core.world.rank == 0:
            try:
                Path(save_dir, LATEST).write_text(name, encoding="utf-8")
            except OSError as error:
                problem = f"save_dir={os.fspath(save_dir)!r} cannot be written: {error.strerror}; give another folder"
        raise_on_all_ranks(problem, self.core.world.device)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load ``load_dir/tag``, by default the tag in ``latest``; return (its folder, the program's state).

        Without ``latest`` and ``tag``: a warning and (None, None). The number of ranks and the ZeRO stage may differ
        from the run that saved. ``load_module_only`` keeps optimizer, scheduler and counters of this engine. Files that
        DeepSpeed itself wrote are read too, in its universal format as well, without running pickled code. Errors:
        ``CheckpointError`` on all ranks.
        """
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn is not supported: load the weights into the model before initialize")
        name = self._latest(load_dir) if tag is None else str(tag)
        if name is None:
            return None, None
        name = self._check_tag(name)
        optimizer_too = load_optimizer_states and not load_module_only
        folder = Path(self._get_optimizer_ckpt_name(load_dir, name) if optimizer_too else os.path.join(load_dir, name))
        self._refuse_absent(folder)
        is_deepspeeds = is_deepspeed_folder(folder)
        before = self.core.state
        self._rates.loads_groups = optimizer_too
        self._rates.loads_scheduler = load_lr_scheduler_states and not load_module_only
        found = self.core.load_checkpoint(folder, load_optimizer=optimizer_too, strict=load_module_strict)
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()  # an incomplete step is discarded
        sampler = getattr(self.training_dataloader, "data_sampler", None)
        if load_module_only:
            self.core.state = before
        elif isinstance(sampler, CurriculumSampler):
            sampler.advance(self.global_steps)
        return str(folder), found if is_deepspeeds else decode(found.get("state", {}))

    def _latest(self, folder: str | os.PathLike[str]) -> str | None:
        """Return the tag in ``latest``, which rank 0 reads; None with a warning if the file does not exist."""
        text = ""
        if self.core.world.rank == 0:
            path = Path(folder, LATEST)
            path = path if path.is_file() else Path(folder, LATEST_UNIVERSAL)
            try:
                text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
            except (OSError, UnicodeDecodeError) as error:
                text = f"\n{path}: cannot be read ({error})"
        text = gather_from_all_ranks(text, self.core.world.device)[0]
        if text.startswith("\n"):
            raise CheckpointError(text.strip())
        if not text:
            logger.warning("%s: no file 'latest', and no tag is given; nothing is loaded", Path(folder, LATEST))
        return text or None

    def _check_tag(self, name: str) -> str:
        """Return the tag of rank 0; raise ``CheckpointError`` on all ranks unless it is the name of a folder.

        Tags that differ between ranks are an error, or with ``checkpoint.tag_validation`` WARN a warning.
        """
        problem = ""
        if not name or name in (".", "..") or Path(name).name != name:
            problem = f"tag={name!r} must be the name of a folder, without {os.sep}"
        raise_on_all_ranks(problem, self.core.world.device)
        by_rank = gather_from_all_ranks(name, self.core.world.device)
        if len(set(by_rank)) > 1:
            texts = ", ".join(map(repr, dict.fromkeys(by_rank)))
            if self._config.tag_validation == "FAIL":
                raise DifferentTags(f"tag differs between ranks: {texts}; give the same tag")
            if self._config.tag_validation == "WARN":
                logger.warning("tag differs between ranks: %s; that of rank 0 is used", texts)
        return by_rank[0]

    def _get_optimizer_ckpt_name(self, checkpoints_path: str | os.PathLike[str], tag: str, expp_rank: int = 0) -> str:
        """Return the path from which optimizer state is loaded: the whole checkpoint, in DeepSpeed a rank's file."""
        return os.path.join(checkpoints_path, tag)

    def _refuse_absent(self, folder: Path) -> None:
        """Raise ``CheckpointError`` for an absent folder."""
        problem = ""
        if self.core.world.rank == 0 and not folder.is_dir():
            problem = f"{folder}: no such checkpoint; give the folder and the tag of one"
        raise_on_all_ranks(problem, self.core.world.device)

    # Weights alone.

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Return the weights and buffers of the model; at stage 3 ``CheckpointError``, because no rank has them all."""
        if self.zero_optimization_partition_weights():
            raise CheckpointError(
                "module_state_dict at zero_optimization.stage=3: weights are in shards; call "
                "engine._zero3_consolidated_16bit_state_dict() or save_16bit_model on all ranks"
            )
        self.core.data_parallel.finish_param_sync()
        options = {} if destination is None else {"destination": destination}
        found = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **options)
        frozen = self._frozen(prefix) if exclude_frozen_parameters else set()
        return {name: tensor for name, tensor in found.items() if name not in frozen} if frozen else found

    def load_module_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Replace the weights of the model, which rank 0 passes, at every stage."""
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn is not supported: pass state_dict itself")
        with self.core.gathered(self.module.parameters(), modify=True):
            self.module.load_state_dict(state_dict, strict=strict)

    def has_split_layers(self) -> bool:
        """Whether ranks hold parts of the model at every ZeRO stage: ``autotp_size``, ``autoep_size``, pipelines."""
        return self.core.groups.size("pp") > 1 or any(
            spec_of(parameter).splits for parameter in self.module.parameters()
        )

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return whole weights and buffers on the CPU of rank 0, None on other ranks; ``ValueError`` below stage 3."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode; below stage 3 use module_state_dict()")
        return self._whole_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return whole weights and buffers on rank 0, None on other ranks; ``ValueError`` if every rank has them."""
        if not (self.zero_optimization_partition_weights() or self.has_split_layers()):
            raise ValueError("every rank has whole weights below stage 3 without autotp_size: use module_state_dict()")
        return self._whole_state_dict(exclude_frozen_parameters)

    def _whole_state_dict(self, exclude_frozen_parameters: bool) -> dict[str, Tensor] | None:
        found = self.core.full_state_dict()
        self._encode_prompts()
        frozen: set[str] = set()
        if exclude_frozen_parameters:  # this rank's module lacks the experts and pipeline stages of other ranks
            names = with_all_experts({name: torch.empty(self.core.world.size) for name in self._frozen()}, self.module)
            frozen.update(
                *(text.split("\n") for text in gather_from_all_ranks("\n".join(names), self.core.world.device))
            )
        return None if self.core.world.rank else {n: tensor for n, tensor in found.items() if n not in frozen}

    @torch.no_grad()
    def _encode_prompts(self) -> None:
        """Encode peft's prompts on all ranks, until the next step: the Trainer lets rank 0 alone save them."""
        model: Any = self.module
        method = getattr(type(model), "get_prompt_embedding_to_save", None)
        if method is not None and hasattr(model, "prompt_encoder"):
            step = self.global_steps
            prompts = {name: method(model, name) for name in model.prompt_encoder}
            model.get_prompt_embedding_to_save = lambda adapter_name: (
                prompts[adapter_name] if self.global_steps == step else method(model, adapter_name)
            )

    def _frozen(self, prefix: str = "") -> set[str]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {f"{prefix}{name}" for name, parameter in named if not parameter.requires_grad}

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights in the dtype of the model, for ``torch.load``, or as ``*.safetensors``; return True.

        At stage 3 without ``stage3_gather_16bit_weights_on_model_save`` nothing is written, and the result is False.
        """
        path = Path(save_dir, save_filename)
        if not self.zero_optimization_partition_weights():
            state: dict[str, Tensor] | None = (
                self._whole_state_dict(exclude_frozen_parameters)
                if self.has_split_layers()
                else self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
            )
        elif self.zero_gather_16bit_weights_on_model_save():
            state = self._whole_state_dict(exclude_frozen_parameters)
        else:
            logger.info("%s is not written: stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        problem = ""
        if self.core.world.rank == 0:
            assert state is not None, "rank 0 has the weights"
            try:
                make_folder(path.parent)
                write_weights(state, path)
            except OSError as error:
                problem = f"{path} cannot be written: {error}; give another folder"
        raise_on_all_ranks(problem, self.core.world.device)
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """As ``save_16bit_model``."""
        return self.save_16bit_model(save_dir, save_filename)
