"""Layer specifications of Megatron Core's experimental attention, which is not supported."""

from megatron.core.unsupported import unsupported

get_transformer_layer_with_experimental_attention_variant_spec = unsupported(
    "experimental_attention_variant is not supported; leave it out"
)
get_transformer_block_with_experimental_attention_variant_spec = (
    get_transformer_layer_with_experimental_attention_variant_spec
)
