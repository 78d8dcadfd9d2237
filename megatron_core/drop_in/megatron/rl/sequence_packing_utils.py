"""The borders that Megatron-LM's ``train_rl.py`` gives to a batch without packed sequences."""

import torch

from megatron.core.packed_seq_params import PackedSeqParams


def get_default_packed_seq_params(
    seq_length: int, max_sequences_per_bin: int, device: torch.device | str
) -> PackedSeqParams:
    """Borders of one sequence of ``seq_length`` tokens, as many as a bin of ``max_sequences_per_bin`` sequences has."""
    borders = torch.full((max_sequences_per_bin + 2,), seq_length, dtype=torch.int32, device=device)
    borders[0] = 0
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=seq_length,
        max_seqlen_kv=seq_length,
        total_tokens=seq_length,
        seq_idx=torch.zeros(1, seq_length, dtype=torch.int32, device=device),
        pad_between_seqs=False,
    )
