"""Defects of multi-latent attention: what tensor-parallel ranks have in common, and whose gradients are parts."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_LATENTS = (
    Defect(
        "the part of the keys that all heads share has one rank's gradient",
        "transformer.latent_attention:LatentAttention._latent",
        "else copy_to_region",
        "else (lambda x, group: x)",
        "latent attention, tp2",
        "C19",
    ),
    Defect(
        "the shared part of the keys has one rank's gradient with sequence parallelism",
        "transformer.latent_attention:LatentAttention._latent",
        "gather_from_sequence if",
        "partial(gather_from_sequence, partial_grad=False) if",
        "latent attention, tp2 sp",
        "C19",
    ),
    Defect(
        "gradients of down projections are not summed over a split sequence",
        "transformer.latent_attention:DownProjection.__init__",
        "partial_grad=context.sequence_parallel",
        "partial_grad=False",
        "latent attention, tp2 sp",
        "C17",
    ),
    Defect(
        "gradients of the latents' norms are summed without sequence parallelism, too",
        "transformer.latent_attention:LatentAttention.__init__",
        "norm(self.rank, partial_grad=context.sequence_parallel)",
        "norm(self.rank, partial_grad=True)",
        "latent attention, tp2",
        "C17",
    ),
)
