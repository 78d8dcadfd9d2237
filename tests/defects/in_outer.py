"""Defects in groups of replicas that exchange their weights every few steps."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, call, returned, without_call

IN_OUTER = (
    Defect(
        "outer gradients are added up instead of averaged",
        "features.outer_steps.optimizer:GroupMessage.wait",
        call("div_", "SELF"),
        "2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "the outer momentum is not Nesterov's",
        "features.outer_steps.optimizer:OuterOptimizer._advance",
        call("add", "FIRST.clone()"),
        "2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "all groups train on the samples of the first",
        "training.setup:Run.first_sample",
        returned("size.consumed_samples + 0"),
        "2 groups",
        culprit="the samples of the step",
    ),
    Defect(
        "gradients of each group are clipped by the mean norm of all",
        "training.driver:take_step",
        argument("update_weights", 2, "norm"),
        "2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "weights after an exchange are not gathered",
        "features.outer_steps.optimizer:OuterOptimizer._write",
        without_call("gather_weights"),
        "2 groups of dp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "the delay of an exchange is ignored",
        "features.outer_steps.settings:OuterConfig.applied_at",
        argument("sent_at", 1, "step"),
        "streams, 2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "all fragments are exchanged at the same step",
        "features.outer_steps.settings:OuterConfig._offset",
        returned("0"),
        "streams, 2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "an exchange replaces a group's own weights completely",
        "features.outer_steps.optimizer:OuterOptimizer._write",
        argument("lerp", 2, "0.0"),
        "streams, 2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "scales of 4-bit numbers are those of a rank's part of a tensor",
        "features.outer_steps.optimizer:OuterOptimizer._largest",
        without_call("all_reduce_"),
        "fp4, 2 groups of dp2",
        culprit="updated weight ",
    ),
    Defect(
        "balancing losses of a group are divided by the sequences of all groups",
        "training.step:_auxiliary_losses",
        argument("AuxiliaryLosses", 1, "size.batch_size"),
        "2 groups of dp2 ep2",
        culprit="gradient of ",
    ),
)
