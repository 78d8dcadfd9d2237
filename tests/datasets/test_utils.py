"""Megatron's names for splits and blends, and for the functions that build the indices."""

import numpy as np
import pytest

from megatron.core.datasets import helpers
from megatron.core.datasets.utils import Split, compile_helpers, get_blend_from_list, normalize
from megatron_core.errors import ConfigError
from tests.features.megatron_order import reference


def test_splits() -> None:
    assert [(split.name, split.value) for split in Split] == [("train", 0), ("valid", 1), ("test", 2)]
    assert compile_helpers() is None


def test_normalized_weights() -> None:
    assert normalize([30, 70]) == [0.3, 0.7]
    many = np.random.default_rng(0).random(1000)
    assert normalize(many.tolist()) == (many / np.sum(many)).tolist()


def test_blends_from_lists() -> None:
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(()) is None, "args.data_path of a launch without --data-path"
    assert get_blend_from_list(["30", "a", "70", "b"]) == (["a", "b"], [30.0, 70.0])
    assert get_blend_from_list([30, "a", 70, " b "]) == (["a", "b"], [30.0, 70.0])
    assert get_blend_from_list(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert get_blend_from_list(["a", "b", "c", "d"]) == (["a", "b", "c", "d"], None)
    for mixed in (["30", "a", "b", "c"], ["a", "b", "70", "c"]):
        with pytest.raises(ConfigError):
            get_blend_from_list(mixed)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_sample_index_of_several_epochs(extra: bool, drop: bool) -> None:
    sizes = np.array([5, 0, 9, 4], dtype=np.int32)
    documents = np.array([2, 0, 1, 3, 0, 3, 2, 1, 1, 0, 2, 3], dtype=np.int32)
    rows = helpers.build_sample_idx(sizes, documents, 7, 3, 18, drop, extra)
    expected = reference.sample_index(sizes.tolist(), documents.tolist(), 7, int(extra), drop)
    assert rows.dtype == np.int32
    assert [tuple(row) for row in rows.tolist()] == expected


def test_blending_indices_are_filled_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    chosen, samples = np.zeros(20, dtype=np.int16), np.zeros(20, dtype=np.int64)
    helpers.build_blending_indices(chosen, samples, np.array([0.25, 0.75]), 2, 20, False)
    assert (chosen.tolist(), samples.tolist()) == reference.blend([0.25, 0.75], 20)
    assert capsys.readouterr().out == ""
    helpers.build_blending_indices(chosen, samples, [0.25, 0.75], 2, 20, True)
    assert "data set 1: weight 0.750000, share 0.750000" in capsys.readouterr().out
    helpers.build_exhaustive_blending_indices(chosen, samples, np.array([8, 12], dtype=np.int64), 2)
    assert (chosen.tolist(), samples.tolist()) == reference.exhaustive_blend([8, 12])
