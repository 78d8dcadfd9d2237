"""OPT and Galactica: learned positions, ReLU or GELU, and biases in all linear layers or in none."""

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import STRING, SWITCH, WIDTH
from megatron_core.hub.hugging_face.rules import GELU, KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange

FIRST_POSITION = 2
"""Row of the stored table of positions that position 0 has; no token has the rows before it."""


def _activation(hf_config: Settings) -> Settings:
    name = hf_config.get("activation_function", "relu")
    if name not in ("relu", *GELU):
        refuse("activation_function", name, f"for opt supported are relu, {', '.join(GELU)}")
    return {"relu": name == "relu", "openai_gelu": GELU.get(name, False)}


def _activation_json(config: ModelConfig) -> Settings:
    gelu = "gelu_new" if config.openai_gelu else "gelu"
    return {"activation_function": "relu" if config.relu else gelu}


def _width_of_embeddings(hf_config: Settings) -> Settings:
    width = hf_config.get("word_embed_proj_dim")
    hidden = hf_config["hidden_size"]
    if width not in (None, hidden):
        refuse("word_embed_proj_dim", width, f"supported is hidden_size={hidden}: OPT 350M cannot be read")
    return {"disable_bias_linear": not hf_config.get("enable_bias", True)}


def rows_of_positions(_: ModelConfig, count: int) -> list[RowRange]:
    """The stored table of positions without its first rows."""
    return [RowRange(0, FIRST_POSITION, FIRST_POSITION + count)]


ACTIVATION = KeyRule(_activation, _activation_json, {"activation_function": STRING})
WIDTH_OF_EMBEDDINGS = KeyRule(
    read=_width_of_embeddings,
    write=lambda config: {"word_embed_proj_dim": config.hidden_size, "enable_bias": config.add_bias_linear},
    types={"enable_bias": SWITCH, "word_embed_proj_dim": WIDTH},
)
