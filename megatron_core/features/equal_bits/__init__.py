"""Equal bits in every layout: sums whose order does not depend on the ranks (``--layout-invariant``)."""

from megatron_core.feature import Feature
from megatron_core.features.equal_bits.rules import has_equal_bits, invariance_problems

EQUAL_BITS = Feature(
    name="equal_bits",
    is_used=has_equal_bits,
    problems=invariance_problems,
    arithmetic="megatron_core.features.equal_bits.arithmetic:exact_arithmetic",
    check_device="megatron_core.features.equal_bits.kernels:check_same_kernels",
    run_part="megatron_core.features.equal_bits.part:EqualBitsPart",
)
