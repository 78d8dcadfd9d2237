"""Defects in groups of replicas that exchange their weights every few steps."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_OUTER = (
    Defect(
        "outer gradients are added up instead of averaged",
        "features.outer_steps.messages:GroupMessage.wait",
        "total.div_(self._group.size())",
        "total",
        "2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "the outer momentum is not Nesterov's",
        "features.outer_steps.optimizer:OuterOptimizer._advance",
        "fragment.mean.add(fragment.momentum, alpha=momentum)",
        "fragment.momentum.clone()",
        "2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "all groups train on the samples of the first",
        "training.setup:Run.first_sample",
        "self.groups.outer.rank() * size.batch_size // self.groups.outer.size()",
        "0",
        "2 groups",
        culprit="the samples of the step",
    ),
    Defect(
        "gradients of each group are clipped by the mean norm of all",
        "training.driver:take_step",
        "[data], own_norm, rates.lr",
        "[data], norm, rates.lr",
        "2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "weights after an exchange are not gathered",
        "features.outer_steps.optimizer:OuterOptimizer._write",
        "self._gather()",
        "pass",
        "2 groups of dp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "the delay of an exchange is ignored",
        "features.outer_steps.settings:OuterConfig.applied_at",
        "step - self.outer_delay",
        "step",
        "streams, 2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "all fragments are exchanged at the same step",
        "features.outer_steps.settings:OuterConfig._offset",
        "fragment * self.outer_steps // self.outer_fragments",
        "0",
        "streams, 2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "an exchange replaces a group's own weights completely",
        "features.outer_steps.optimizer:OuterOptimizer._write",
        "self.config.outer_alpha",
        "0.0",
        "streams, 2 groups",
        culprit="updated weight ",
    ),
    Defect(
        "scales of 4-bit numbers are those of a rank's part of a tensor",
        "features.outer_steps.optimizer:OuterOptimizer._largest",
        "all_reduce_(maxima[shard], shard.bucket.dp_group, maximum=True)",
        "pass",
        "fp4, 2 groups of dp2",
        culprit="updated weight ",
    ),
    Defect(
        "balancing losses of a group are divided by the sequences of all groups",
        "training.step:_auxiliary_losses",
        "size.batch_size // run.groups.outer.size()",
        "size.batch_size",
        "2 groups of dp2 ep2",
        culprit="gradient of ",
    ),
)
