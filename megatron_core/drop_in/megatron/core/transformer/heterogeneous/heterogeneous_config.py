"""The configuration of a model whose layers differ in their sizes."""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.features.layer_sizes.settings import (
    LAYERS_JSON,
    LayerBlock,
    compact_json,
    read_blocks,
    read_layers_file,
)


@dataclass
class AttentionConfig:
    """The attention of a layer."""

    no_op: bool = False
    replace_with_linear: bool = False
    num_query_groups: int | None = None


@dataclass
class MLPConfig:
    """The MLP of a layer."""

    no_op: bool = False
    replace_with_linear: bool = False
    ffn_hidden_size: int | None = None


@dataclass
class TransformerBlockConfig:
    """The parts of a layer."""

    attention: AttentionConfig
    mlp: MLPConfig

    @classmethod
    def of(cls, block: LayerBlock) -> "TransformerBlockConfig":
        """Return the record for the engine's."""
        attention, mlp = block.attention, block.mlp
        return cls(
            AttentionConfig(attention.no_op, attention.linear, attention.size),
            MLPConfig(mlp.no_op, mlp.linear, mlp.size),
        )


@dataclass
class HeterogeneousTransformerConfig(TransformerConfig):
    """``TransformerConfig`` with sizes for each layer, from JSON in a file or in a string; see docs/layer_sizes.md."""

    heterogeneous_layers_config_path: str = ""
    heterogeneous_layers_config_encoded_json: str = ""
    per_block_parameters: list[TransformerBlockConfig] = field(init=False)

    def __post_init__(self) -> None:
        """Read the sizes. Raises ConfigError for JSON with faults."""
        super().__post_init__()
        own: Any = self
        own.heterogeneous_block_specs = True
        try:
            own.heterogeneous_layers_config_encoded_json = (
                compact_json(self.heterogeneous_layers_config_encoded_json)
                if self.heterogeneous_layers_config_encoded_json
                else read_layers_file(self.heterogeneous_layers_config_path)
            )
        except ValueError as error:
            raise ConfigError(f"{LAYERS_JSON}: {error}") from None
        blocks, faults = read_blocks(own.heterogeneous_layers_config_encoded_json, own.hidden_size, self._heads)
        if faults:
            raise ConfigError("; ".join(f"{LAYERS_JSON} {fault}" for fault in faults))
        if len(blocks) != own.num_layers:
            raise ConfigError(f"{LAYERS_JSON} has {len(blocks)} layers, but num_layers={own.num_layers}")
        own.per_block_parameters = [TransformerBlockConfig.of(block) for block in blocks]

    @property
    def _heads(self) -> int:
        return self.num_attention_heads

    def model_config(self, *, without_pattern: bool = False, **given: Any) -> ModelConfig:
        """Return the engine's configuration of the model, with the sizes of its layers."""
        given |= {LAYERS_JSON: self.heterogeneous_layers_config_encoded_json}
        return super().model_config(without_pattern=without_pattern, **given)

    def get_config_for_layer(self, layer_number: int) -> TransformerConfig:
        """Return the configuration of a layer, numbered from 1, with its sizes."""
        if not 1 <= layer_number <= len(self.per_block_parameters):
            raise ValueError(f"layer_number={layer_number} must be from 1 to {len(self.per_block_parameters)}")
        block = self.per_block_parameters[layer_number - 1]
        sizes = {"num_query_groups": block.attention.num_query_groups, "ffn_hidden_size": block.mlp.ffn_hidden_size}
        settings = {each.name: getattr(self, each.name) for each in fields(TransformerConfig) if each.init}
        changes = {name: size for name, size in sizes.items() if size is not None}
        return TransformerConfig(**settings | {"heterogeneous_block_specs": False} | changes)
