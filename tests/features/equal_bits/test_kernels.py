"""All ranks of a run with ``--layout-invariant`` have the same kernels."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.equal_bits.fixed_products import NATIVE_DTYPES, describe_products
from megatron_core.features.equal_bits.kernels import check_same_kernels
from megatron_core.ops import native
from megatron_core.verify.ranks import run_ranks

CPU = torch.device("cpu")


def _refusal_with(reduced: str) -> str:
    """The error of a rank, if rank 1 has other kernels; "" if there is none."""
    if dist.get_rank() == 1 and reduced == "narrow vectors":
        native.library("cpu", torch.float32).megatron_limit_fixed_kernels(0)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1 and reduced == "no library":
            patch.setattr(native, "unavailable_reason", lambda *_: "not in this test")
        try:
            check_same_kernels(RunConfig(), CPU)
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("reduced", ["narrow vectors", "no library"])
def test_a_rank_with_other_kernels_is_named_on_all_ranks(reduced: str) -> None:
    if native.unavailable_reason("fixed_products", "cpu", torch.float32):
        pytest.skip("there is no native library")
    if reduced == "narrow vectors" and all(native.fixed_kernel(dtype) == "vectors" for dtype in NATIVE_DTYPES):
        pytest.skip("this processor has no other kernels")
    told = run_ranks(3, _refusal_with, reduced)
    assert told == [told[0]] * 3
    assert re.search(
        rf"ranks 0, 2: {re.escape(describe_products('cpu'))}; rank 1: .*remove --layout-invariant", told[0]
    )
    assert run_ranks(2, _refusal_with, "nothing") == ["", ""]
