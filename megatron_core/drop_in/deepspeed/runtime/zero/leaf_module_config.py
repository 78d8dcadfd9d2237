"""The section ``leaf_module``: modules that ZeRO 3 gathers as a whole, as whole layers are here in any case."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{folder}.modeling_{folder}.{name}SparseMoeBlock"
    for folder, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def _each_once(value: Any) -> list[str]:
    return list(dict.fromkeys([value] if isinstance(value, str) else map(str, value)))


Texts = Annotated[list[str], BeforeValidator(_each_once)]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Classes, names and ends of names of modules."""

    classes: Texts = DEFAULT_LEAF_MODULE_CLASSES
    names: Texts = DEFAULT_LEAF_MODULE_NAMES
    name_suffixes: Texts = DEFAULT_LEAF_MODULE_NAME_SUFFIXES
