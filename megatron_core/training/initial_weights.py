"""The weights in another folder with which a run starts, and the weights that features add to them."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megatron_core.checkpoint import open_newest
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import RunConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.models import GPTModel
from megatron_core.parallel.initialization import draw_by_name
from megatron_core.training.compatibility import check_same_model, check_state, stored_config
from megatron_core.training.parts import added_weights, outside_of, weights_saved_alone
from megatron_core.training.state import held_weights, open_initial_weights


def open_base(config: RunConfig, device: torch.device, *, resumes: bool = False) -> StateReader | None:
    """Open the weights that a run fine-tunes: --pretrained-checkpoint or --load-hf; None: drawn by the seed.

    If it ``resumes``, only those that its own checkpoints do not contain.
    """
    # The checkpoint has all weights, and the folder of the base may be gone.
    if resumes and weights_saved_alone(config) is None:
        return None
    folder = config.optional("pretrained_checkpoint")
    if folder is None:
        return open_initial_weights(config)
    reader = open_newest(folder, None, verify=config.checkpoint.verify_checkpoint, device=device)
    if reader is None:
        raise CheckpointError(f"pretrained_checkpoint={folder!r} has no checkpoint; give a folder of --save")
    stored = check_state(reader.state, reader.folder)
    of_model = {name: stored[name] for name in vars(config.model) if name in stored}
    check_same_model(of_model, config, only_weights=True)
    if (added := weights_saved_alone(stored_config(reader.folder))) is not None:
        raise CheckpointError(
            f"pretrained_checkpoint={folder!r} has only {added.title}; resume them with --load {folder}, or merge them "
            "with megatron-convert --from native --to hf and give the result as --load-hf"
        )
    return reader


class InitialWeights:
    """The weights of a run before it loads its own ``checkpoint``, or None.

    They come from the base (``open_base``) or the checkpoint, except for those that features add, which are drawn;
    without either, all are drawn.
    """

    def __init__(self, config: RunConfig, checkpoint: StateReader | None, device: torch.device) -> None:
        self.config = config
        self.resumes = checkpoint is not None
        self.base = open_base(config, device, resumes=self.resumes)
        self._saved_alone = weights_saved_alone(config)
        source = checkpoint if self.base is None and self._saved_alone is None else self.base
        self.are_drawn = source is None
        stored = {} if source is None else source.state.get("config", {})
        self._added = added_weights(config)
        self._missing = [added for added in self._added if added.saved_alone or added.are_missing(stored)]

    def draw(self, name: str, parameter: nn.Parameter) -> None:
        """Draw a parameter, or leave it uninitialized if it will be loaded."""
        if self.are_drawn or any(added.contain(name) for added in self._missing):
            # By name and element, so that a model has the same weights in every layout.
            draw_by_name(name, parameter, self.config.training.seed)

    def draw_missing(self, stages: Iterable[GPTModel]) -> None:
        """Draw the parameters of ``stages`` that will not be loaded; deferred ones are drawn when allocated."""
        if self.are_drawn or not self._missing:
            return
        for name, parameter in (named for stage in stages for named in stage.named_global_parameters()):
            if not parameter.is_meta:
                self.draw(name, parameter)

    def load(self, data: DataParallel, stages: Mapping[int, GPTModel]) -> None:
        """Load the weights of the base, and set initial values that depend on them.

        It precedes the construction of the optimizer, which copies the trained weights.
        """
        if self.base is not None:
            with self.base:
                self.base.fill(outside_of(self._missing, held_weights(data)))
        if self._saved_alone is not None:
            in_checkpoints = [added for added in self._added if added.saved_alone or added.saved_always]
            data.is_saved = lambda name: any(added.contain(name) for added in in_checkpoints)
        for added in () if self.resumes else self._added:
            added.set_initial(data, list(stages.values()))
