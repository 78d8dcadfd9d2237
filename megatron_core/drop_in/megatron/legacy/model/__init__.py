"""Megatron-LM's models before ``megatron.core``, which are not supported, and their parts at former paths."""

from megatron.legacy.model.bert_model import BertModel
from megatron.legacy.model.gpt_model import GPTModel
from megatron.legacy.model.t5_model import T5Model
