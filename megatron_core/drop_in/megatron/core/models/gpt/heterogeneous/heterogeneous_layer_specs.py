"""Layer specifications from a file for each layer, which are not supported."""

from megatron.core.unsupported import unsupported

get_gpt_heterogeneous_layer_spec = unsupported(
    "heterogeneous_layers_config_path is not supported; build TransformerBlockSubmodules(layer_specs=[...]) with one "
    "specification for each layer"
)
