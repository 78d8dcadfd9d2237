"""Fine-tuning on conversations: JSON Lines with messages, chat templates, and a loss only on answers (--sft)."""

from megatron_core.feature import Feature
from megatron_core.features.conversations.rules import conversation_problems
from megatron_core.features.conversations.settings import ConversationConfig, uses_conversations

CONVERSATIONS = Feature(
    name="conversations",
    settings=ConversationConfig,
    is_used=uses_conversations,
    problems=conversation_problems,
    data_part="megatron_core.features.conversations.build:ConversationData",
)
