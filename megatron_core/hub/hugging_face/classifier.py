"""Models of transformers for sequence classification with one label, such as reward models: a head of one output."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_core.hub.hugging_face.rules import Settings, refuse

CLASSIFIER = "ForSequenceClassification"
"""End of the names of their classes."""
TENSORS = {"output_layer.score": "score.weight"}
"""Our weight of the head -> the stored one, in all architectures."""


def is_value_model(hf_config: Mapping[str, Any]) -> bool:
    """Whether a folder has a head of one output. Errors: ``CheckpointError`` for a classifier with several labels."""
    classes = hf_config.get("architectures") or []
    if not isinstance(classes, list):
        refuse("architectures", classes, "it must be a list of names of classes")
    if not any(str(name).endswith(CLASSIFIER) for name in classes):
        return False
    # Two is the default of transformers.
    names = hf_config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(names, dict):
        refuse("id2label", names, "it must be an object with the names of the labels")
    labels = hf_config.get("num_labels", len(names))
    if labels != 1:
        refuse("num_labels", labels, f"{classes[0]} is supported with one label, as reward models have")
    return True


def numbers_of(model: Any, prompt: Tensor) -> Tensor:
    """The logits ``[b, s, vocabulary]`` of a model of transformers, or the value of each token ``[b, s]``."""
    if not hasattr(model, "score"):
        return model(input_ids=prompt, use_cache=False).logits
    values: Tensor = model.score(model.base_model(input_ids=prompt, use_cache=False)[0])
    return values.squeeze(-1)


def classifier_keys(class_name: str) -> Settings:
    """The keys of config.json of a value model, whose body is that of the class ``class_name``."""
    classifier = re.sub("(ForCausalLM|LMHeadModel)$", CLASSIFIER, class_name)
    # transformers takes the number of labels from their names.
    return {"architectures": [classifier], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
