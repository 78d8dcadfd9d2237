"""The borders of the documents in a packed batch."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.parallel.groups import Group


@dataclass
class PackedSeqParams:
    """Documents in one sequence ("thd"), with the borders ``cu_seqlens_q`` ``[documents + 1]``.

    Borders count tokens from 0 to the length. Queries and keys have the same borders. Padded layouts (the other fields)
    are not supported.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_kv: int | Tensor | None = None
    local_cp_size: int | None = None
    cp_group: Group | None = None
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    tokens_per_sample: int | None = None
    pad_between_seqs: bool | None = None

    def document_lengths(self, batch: int, length: int) -> list[list[int]]:
        """Return the lengths of the documents of each of ``batch`` sequences of ``length`` tokens.

        The borders of several sequences may be concatenated, as in a batch that was flattened to one sequence.
        """
        padded = self.cu_seqlens_q_padded
        if self.cu_seqlens_q is None or (padded is not None and not padded.equal(self.cu_seqlens_q)):
            raise ConfigError("PackedSeqParams: cu_seqlens_q is required, and cu_seqlens_q_padded is not supported")
        borders = self.cu_seqlens_q.unique_consecutive().tolist()  # some programs repeat the last border
        lengths: list[list[int]] = [[] for _ in range(batch)]
        for start, stop in pairwise(borders):
            if start // length >= batch or (stop - 1) // length != start // length:
                raise ConfigError(f"PackedSeqParams: a document [{start}, {stop}) crosses sequences of {length} tokens")
            lengths[start // length].append(stop - start)
        return lengths
