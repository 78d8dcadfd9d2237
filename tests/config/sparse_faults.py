"""Faulty settings of sparse attention, in the form of ``faults.FAULTS``."""

from __future__ import annotations

from typing import Any

DSA = {
    "experimental_attention_variant": "dsa",
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
}
WARMUP = {"dsa_indexer_loss_coeff": 0.5, "dsa_indexer_warmup": True}
DPO = {"dpo": True, "mock_data": False, "data_path": ("pairs",), "micro_batch_size": 2, "pretrained_checkpoint": "in"}
NAMED = "experimental_attention_variant=dsa"
SPARSE_FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({"dsa_indexer_topk": 64}, 1, ("dsa_indexer_topk=64", "--experimental-attention-variant dsa")),
    (DSA | {"multi_latent_attention": False}, 1, (NAMED, "--multi-latent-attention")),
    (DSA | {"dsa_indexer_head_dim": 32}, 1, ("dsa_indexer_head_dim=32", "qk_pos_emb_head_dim=64")),
    (DSA | {"dsa_indexer_use_sparse_loss": True}, 1, ("dsa_indexer_use_sparse_loss=True", "--dsa-indexer-loss-coeff")),
    (DSA | {"dsa_indexer_warmup": True}, 1, ("dsa_indexer_warmup=True", "--dsa-indexer-loss-coeff")),
    (DSA | WARMUP | {"dsa_indexer_use_sparse_loss": True}, 1, ("dsa_indexer_use_sparse_loss=True", "warmup=True")),
    (DSA | WARMUP | {"mtp_num_layers": 1}, 1, ("mtp_num_layers=1", "dsa_indexer_warmup=True")),
    (DSA | WARMUP | {"qk_clip": True, "optimizer": "muon"}, 1, ("qk_clip=True", "dsa_indexer_warmup=True")),
    (DSA | DPO | {"dsa_indexer_loss_coeff": 0.5}, 1, ("dsa_indexer_loss_coeff=0.5", "dpo=True")),
    (DSA | {"attention_dropout": 0.1}, 1, ("attention_dropout=0.1", NAMED)),
    (DSA | {"window_size": (4, 0)}, 1, ("window_size=(4, 0)", NAMED)),
    (DSA | {"attn_logit_softcapping": 5.0}, 1, ("attn_logit_softcapping=5.0", NAMED)),
    (DSA | {"attention_backend": "flex"}, 1, ("attention_backend=flex", NAMED)),
    (DSA | {"context_parallel_size": 2}, 2, ("cp_comm_type=p2p", "--cp-comm-type all_gather")),
    (DSA | {"compile": True}, 1, ("compile=True", NAMED)),
    (DSA | {"fp8_format": "hybrid", "bf16": True}, 1, ("fp8_format=hybrid", NAMED)),
    (DSA | {"linear_attention_freq": (2,)}, 1, ("linear_attention_freq=(2,)", "gated_delta_net")),
    (DSA | {"lora_rank": 4, "dsa_indexer_loss_coeff": 0.5}, 1, ("dsa_indexer_loss_coeff=0.5", "lora_rank=4")),
]
