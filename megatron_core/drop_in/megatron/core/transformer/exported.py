"""The layers of a built model as instances of Megatron Core's classes."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.layer_context import SampleNumbers, sequence_context
from megatron.core.transformer.loss_collector import LossCollector
from megatron.core.transformer.module import MegatronModule
from megatron_core.errors import ConfigError
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext


class ExportedModule(LossCollector, MegatronModule):
    """A class with Megatron Core's arguments over one of this package's, ``stands_for``.

    ``forward`` takes Megatron's arguments, or those of this package's class, with which a built model calls it.
    """

    stands_for: ClassVar[type[nn.Module]]
    _context: LayerContext | None = None
    _samples: SampleNumbers

    def bind(self, config: Any, context: LayerContext, samples: SampleNumbers) -> None:
        """Keep what calls with Megatron's arguments need."""
        self.config, self._context, self._samples = config, context, samples

    @property
    def context(self) -> LayerContext:
        """What the module was built from."""
        assert self._context is not None, "adopt has bound it"
        return self._context

    def sequence(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> SequenceContext:
        """What this package's layers need to know of ``hidden`` ``[s, b, h]``, with the next numbers of sequences."""
        length, batch = hidden.shape[:2]
        samples = self._samples.take(batch, hidden.device) if self.training else None
        if isinstance(rotary_pos_emb, tuple):  # one for queries and one for keys, which have the same positions here
            rotary_pos_emb = rotary_pos_emb[0]
        documents = None
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            split = self.context.split
            whole = length * split.cp_size * (split.tp_size if split.sequence_parallel else 1)
            lengths = packed_seq_params.document_lengths(batch, whole)
            documents, attention_mask = PackedDocuments.of(lengths, batch, whole, hidden.device), None
        return sequence_context(
            self.context, hidden, attention_mask, rotary_pos_emb, samples, padding_mask, documents=documents
        )


def refuse(user: str, **given: Any) -> None:
    """ConfigError for arguments that are not None."""
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ConfigError(f"{user}: {', '.join(wrong)} is not supported; leave it out")


def adopt(
    root: nn.Module, classes: Iterable[type[ExportedModule]], config: Any, context: LayerContext, samples: SampleNumbers
) -> None:
    """Make the modules in ``root`` instances of ``classes``; weights, names and results stay. Later changes of
    ``config`` reach them, see ``ChangingConfig``."""
    config.add_model(root, context.config)
    exported = {each.stands_for: each for each in classes}
    for module in root.modules():
        if type(module) in exported:
            module.__class__ = exported[type(module)]
        if isinstance(module, ExportedModule) and module._context is None:
            module.bind(config, context, samples)
