"""Planting changes the code for all callers, temporarily, and refuses missing fragments."""

from __future__ import annotations

import ast

import pytest
import torch

from megatron_core.features.context_parallelism.tiles import tiles
from megatron_core.optimizer.clip import clip_factor
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.initialization import initialise
from megatron_core.parallel.sharding import replicated
from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.training.setup import Run
from tests.defects.defect import Defect
from tests.defects.defects import DEFECTS
from tests.defects.patch import (
    Patch,
    argument,
    assigned,
    attribute,
    call,
    condition,
    constant,
    expression,
    returned,
    statement,
    without_argument,
    without_call,
    without_statement,
)
from tests.defects.plant import planted
from tests.defects.source import definition_of, function_of

CLIP = "optimizer.clip:clip_factor"


def test_every_reference_sees_the_change_until_the_end() -> None:
    with planted(CLIP, "limit /", "2 * limit /"):
        assert clip_factor(8.0, 2.0) == pytest.approx(0.5)
    assert clip_factor(8.0, 2.0) == pytest.approx(0.25)


def test_results_kept_from_before_are_forgotten() -> None:
    whole = ((0, 8),)
    expected = tiles(whole, whole, None, 2)
    with planted("features.context_parallelism.tiles:_with_window", "rows.start - window + 1", "rows.start"):
        assert tiles(whole, whole, None, 2) is not expected
    assert tiles(whole, whole, None, 2) == expected


def test_code_is_restored_after_an_error() -> None:
    healthy = clip_factor.__code__
    with pytest.raises(KeyError), planted(CLIP, "limit /", "2 * limit /"):
        raise KeyError
    assert clip_factor.__code__ is healthy


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("1.0", 2)])
def test_refuses_what_is_not_there_exactly_once(old: str, times: int) -> None:
    healthy = clip_factor.__code__
    with pytest.raises(AssertionError, match=f"has {times} times"), planted(CLIP, old, ""):
        pass
    assert clip_factor.__code__ is healthy


def test_refuses_names_that_the_source_does_not_have() -> None:
    with (
        pytest.raises(AssertionError, match="clip_factor has no norm_of_all"),
        planted(CLIP, "limit /", "norm_of_all /"),
    ):
        pass


def test_methods_that_call_super() -> None:
    with planted("tensor_parallel.dropout:KeyedDropout.__init__", "self.p = p", "self.p = p / 2"):
        assert KeyedDropout(0.5, 1, "here").p == 0.25
    assert KeyedDropout(0.5, 1, "here").p == 0.5


def test_functions_behind_decorators() -> None:
    """Properties, static methods and wrapped functions: the plain function inside is changed."""
    assert function_of("training.setup:Run.layout") is Run.layout.fget
    assert function_of("parallel.groups:ParallelGroups.single") is ParallelGroups.single.__func__
    with planted("parallel.sharding:ShardSpec.copied_axes", "not in", "in"):
        assert replicated((3, 2)).copied_axes == ()
    parameter = torch.nn.Parameter(torch.ones(2))
    with planted("parallel.initialization:initialise", "init_method(drawn)", "drawn.fill_(7.0)"):
        initialise(parameter, torch.nn.init.zeros_)
    assert parameter.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_can_be_planted(defect: Defect) -> None:
    """Only ``make verify-all`` runs all defects, so a changed source would otherwise not be noticed."""
    with planted(defect.target, defect.patch):
        pass


def step_of(batch, scale, group):
    total = all_reduce(sum(batch), group)  # noqa: F821
    total.add_(1)
    if scale > 0 and batch:
        total = scaled(total, factor=scale, exact=True)  # noqa: F821
    return total


@pytest.mark.parametrize(
    ("patch", "line"),
    [
        (without_call("add_"), "pass"),
        (call("all_reduce", "2 * FIRST"), "total = 2 * sum(batch)"),
        (call("add_", "SELF.sub_(FIRST)"), "total.sub_(1)"),
        (argument("all_reduce", 1, "other(OLD)"), "total = all_reduce(sum(batch), other(group))"),
        (argument("scaled", "factor", "1.0"), "total = scaled(total, factor=1.0, exact=True)"),
        (without_argument("scaled", "exact"), "total = scaled(total, factor=scale)"),
        (constant(1, "2"), "total.add_(2)"),
        (attribute("add_", "SELF"), "SELF(1)"),
        (returned("-OLD"), "return -total"),
        (assigned("total", "0", number=2), "total = 0"),
        (condition("not OLD"), "if not (scale > 0 and batch):"),
        (expression("scale>0", "scale >= 0"), "if scale >= 0 and batch:"),
        (statement("total.add_( 1 )", "total.add_(1)\ntotal.add_(2)"), "total.add_(2)"),
        (without_statement("return total"), "pass"),
    ],
)
def test_patches(patch: Patch, line: str) -> None:
    """Each changes one line of the function, whatever the layout of its source."""
    definition = definition_of(step_of)
    before, after = ast.unparse(definition).splitlines(), ast.unparse(patch(definition)).splitlines()
    assert [text.strip() for text in after if text not in before] == [line]


@pytest.mark.parametrize("patch", [call("all_gather", "FIRST"), constant(3, "4"), assigned("total", "0")])
def test_refuses_a_part_that_is_not_there_exactly_once(patch: Patch) -> None:
    with pytest.raises(AssertionError, match="times, not once"):
        patch(definition_of(step_of))
