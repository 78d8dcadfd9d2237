"""Defects of QK-clip, z-loss, SOAP and AdaMuon: maxima of a part of the batch, wrong rows, columns, bases or means."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, attribute, call, constant, expression, statement

IN_STABILITY = (
    Defect(
        "the gradient of log Z is missing at the target",
        "features.output_losses.head:_CrossEntropyAndLogZ.backward",
        argument("scatter_add_", 2, "0 * OLD"),
        "z-loss, tp2 sp",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "every rank adds the gradient of log Z to its own column of the target",
        "features.output_losses.head:_CrossEntropyAndLogZ.backward",
        statement(
            "column = (target - loss.first).where(is_local, 0)",
            "column, is_local = (target - loss.first).clamp(0, loss.valid - 1), target >= 0",
        ),
        "z-loss, tp2 sp",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "the z-loss ignores the mask",
        "features.output_losses.head:with_z_loss",
        expression("log_z.square() * loss_mask.transpose(0, 1)", "log_z.square()"),
        "z-loss, packed, cp2",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "the largest logit is that of a rank's part of the batch",
        "features.qk_clip.clip:QKClip.clip",
        argument("group", 0, "'tp'"),
        "muonclip, dp2 zero3",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "a key that ranks share is scaled by the heads of one rank",
        "features.qk_clip.clip:QKClip.clip",
        argument("group", 0, "'dp-cp'"),
        "qk-clip, 1 group, tp2 sp",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "queries see only the keys of their rank",
        "features.qk_clip.clip:MaxLogits.record",
        argument("start_gather_sequence", 0, "OLD.roll(1, 0)", number=1),
        "qk-clip, window, cp2",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "positions of keys are those of the first rank",
        "features.qk_clip.clip:MaxLogits.record",
        call("start_gather_sequence", "(torch.arange(len(key)), handle)", number=2),
        "qk-clip, packed, 2 groups, cp2",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "a rank scales the first rows of the whole weight",
        "features.qk_clip.clip:QKClip._scale",
        call(
            "localise", "SECOND.copy_(factors[:len(SECOND)].view(-1, *[1] * (SECOND.dim() - 1)).expand(SECOND.shape))"
        ),
        "muonclip of latents, tp2 sp",
        culprit="updated weight decoder.layers.*.self_attention.linear_q*",
    ),
    Defect(
        "rounding chooses the basis of the null spaces of SOAP's factors",
        "features.matrix_optimizers.soap:next_basis",
        argument("add_", 0, "0.0"),
        "soap, tp2",
        culprit="updated weight ",
    ),
    Defect(
        "SOAP's variance is that of the gradient before its rotation",
        "features.matrix_optimizers.soap:SOAP.transform",
        call("_rotated", "FIRST", number=1),
        "soap, dp2 zero3",
        culprit="updated weight ",
    ),
    Defect(
        "SOAP's update of the values is in the bases of the keys",
        "features.matrix_optimizers.soap:SOAP.transform",
        argument("_key", 1, "min(OLD, 1)"),
        "soap, tp2",
        culprit="updated weight *linear_qkv",
    ),
    Defect(
        "SOAP's bases are updated in other steps",
        "features.matrix_optimizers.soap:SOAP._update_bases",
        constant(0, "1", number=1),
        "soap, pp2",
        culprit="updated weight ",
    ),
    Defect(
        "SOAP forgets the state of experts after every step",
        "features.matrix_optimizers.updates:MatrixAlgorithm._transformed",
        attribute("states", "OLD.pop(task) and vars(self).pop('states') and OLD"),
        "soap, experts, gate and up apart, ep2",
        culprit="updated weight ",
    ),
    Defect(
        "AdaMuon's second moment is of the last step alone",
        "features.matrix_optimizers.muon:AdaMuon.transform",
        call("lerp_", "SELF.copy_(FIRST)", number=1),
        "adamuon, tp2",
        culprit="updated weight ",
    ),
    Defect(
        "NorMuon averages over the longer dimension of a matrix's second moment",
        "features.matrix_optimizers.muon:_averaged",
        constant(1, "2", number=2),
        "normuon, dp2 zero1, overlap",
        culprit="updated weight ",
    ),
    Defect(
        "NorMuon's norms are those of all experts that a rank updates at once",
        "features.matrix_optimizers.muon:AdaMuon.transform",
        call("sum", "SELF.sum()"),
        "normuon, experts, dp2 tp2 ep2 zero1",
        culprit="updated weight *experts",
    ),
    Defect(
        "NorMuon scales the orthogonal matrices before it measures their norm, and again afterwards",
        "features.matrix_optimizers.muon:AdaMuon._of_part",
        call("_orthogonal", "self._scaled(OLD)"),
        "normuon, 2 groups, tp2 sp",
        culprit="updated weight ",
    ),
)
