"""Defects of QK-clip and z-loss: maxima of a part of the batch, wrong rows, wrong columns."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_STABILITY = (
    Defect(
        "the gradient of log Z is missing at the target",
        "tensor_parallel.log_z:_CrossEntropyAndLogZ.backward",
        "of_log_z.where(here, 0.0)",
        "0 * of_log_z.where(here, 0.0)",
        "z-loss, tp2 sp",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "every rank adds the gradient of log Z to its own column of the target",
        "tensor_parallel.log_z:_CrossEntropyAndLogZ.backward",
        "column = (target - loss.first).where(here, 0)",
        "column, here = (target - loss.first).clamp(0, loss.valid - 1), target >= 0",
        "z-loss, tp2 sp",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "the z-loss ignores the mask",
        "transformer.z_loss:with_z_loss",
        "log_z.square() * loss_mask.transpose(0, 1)",
        "log_z.square()",
        "z-loss, packed, cp2",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "the largest logit is that of a rank's part of the batch",
        "optimizer.qk_clip:QKClip.clip",
        'all_reduce_(largest, self.groups.group("tp-dp-cp"), maximum=True)',
        'all_reduce_(largest, self.groups.group("tp"), maximum=True)',
        "muonclip, dp2 zero3",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "a key that ranks share is scaled by the heads of one rank",
        "optimizer.qk_clip:QKClip.clip",
        'all_reduce_(largest, self.groups.group("tp-dp-cp"), maximum=True)',
        'all_reduce_(largest, self.groups.group("dp-cp"), maximum=True)',
        "qk-clip, 1 group, tp2 sp",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "queries see only the keys of their rank",
        "transformer.max_logits:MaxLogits.record",
        "start_gather_sequence(key.detach(), self.group)",
        "start_gather_sequence(key.detach().roll(1, 0), self.group)",
        "qk-clip, window, cp2",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "positions of keys are those of the first rank",
        "transformer.max_logits:MaxLogits.record",
        "of_keys, other = start_gather_sequence(positions, self.group)",
        "of_keys, other = torch.arange(len(key)), handle",
        "qk-clip, packed, 2 groups, cp2",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "a rank scales the first rows of the whole weight",
        "optimizer.qk_clip:QKClip._scale",
        "spec.localise(whole.view(-1, *[1] * (local.dim() - 1)).expand(spec.global_shape), local)",
        "local.copy_(whole[: len(local)].view(-1, *[1] * (local.dim() - 1)).expand(local.shape))",
        "muonclip of latents, tp2 sp",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
)
