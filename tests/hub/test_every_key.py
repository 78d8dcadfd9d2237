"""No key of an architecture is ignored silently."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from transformers import CONFIG_MAPPING, GPTJConfig, PreTrainedConfig

from megatron_core.errors import CheckpointError
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES, architecture_of

OF_TRANSFORMERS = [name for name in ARCHITECTURES if name in CONFIG_MAPPING]
COMMON = {field.name for field in fields(PreTrainedConfig)}
WITHOUT_LOGITS = {
    "gpt2": {"reorder_and_upcast_attn"},  # a precision
    "gpt_bigcode": {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"},  # precisions
    "gpt_neox": {"classifier_dropout", "is_decoder"},
    "youtu": {"embedding_initializer_range"},
    "phi3": {"embd_pdrop"},  # transformers does not read it
}
"""Keys on which the logits of a model of text do not depend."""
SUMMARY = re.compile("summary_.*")  # of classifiers


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_every_key_of_transformers_has_a_place(name: str) -> None:
    theirs = {field.name for field in fields(CONFIG_MAPPING[name])} - COMMON
    unplaced = theirs - ARCHITECTURES[name].known_keys() - WITHOUT_LOGITS.get(name, set())
    assert {key for key in unplaced if not SUMMARY.fullmatch(key)} == set()
    assert theirs, "the class of transformers declares its keys"


def test_an_unknown_architecture_is_refused_with_its_own_keys() -> None:
    """Keys that every file of transformers has are not among them."""
    with pytest.raises(CheckpointError, match=r"gpt2 is nearest, and has no key rotary_dim$"):
        architecture_of(GPTJConfig().to_dict())
