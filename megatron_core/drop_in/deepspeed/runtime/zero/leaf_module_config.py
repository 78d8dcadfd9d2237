"""The section ``leaf_module``: modules that ZeRO 3 gathers as a whole, as whole layers are here in any case."""

from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{folder}.modeling_{folder}.{name}SparseMoeBlock"
    for folder, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Classes, names and ends of names of modules."""

    classes: list[str] = DEFAULT_LEAF_MODULE_CLASSES
    names: list[str] = DEFAULT_LEAF_MODULE_NAMES
    name_suffixes: list[str] = DEFAULT_LEAF_MODULE_NAME_SUFFIXES

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **data)
        for key in self.keys():
            value = getattr(self, key)
            setattr(self, key, list(dict.fromkeys([value] if isinstance(value, str) else map(str, value))))
