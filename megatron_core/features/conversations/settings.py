"""Settings of fine-tuning on conversations."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import ranges as r
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Condition, Resume, given, section, setting

# Preferences are lines with two conversations; a package without that feature does not have its setting.
LINES_WITH_MESSAGES = Condition("--sft or --dpo", lambda run: run.value("sft") or run.optional("dpo"))


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class ConversationConfig:
    """Fine-tune on conversations."""

    sft: bool = setting(False, when=ALWAYS)
    """Fine-tune on conversations: data files are JSON Lines with messages, and the loss includes only answers."""
    sft_packing: Literal["none", "first_fit"] = setting("none", needs=given("sft"))
    """first_fit: a sequence has as many whole conversations as fit, each with its own positions and attention. none:
    one line of the file, padded."""
    sft_loss: Literal["answers", "last_answer"] = setting("answers", needs=given("sft"))
    """The assistant's turns in the loss: all, or the last one of each conversation."""
    chat_template_date: str = setting("2024-07-26", r.DATE, needs=LINES_WITH_MESSAGES)
    """Date, as YYYY-MM-DD, that a chat template writes as today's (strftime_now) in --sft and --dpo, so that runs on
    other days have the same tokens; default: the date of Llama 3's templates."""


def uses_conversations(config: RunConfig) -> bool:
    """Whether the data files of a run contain conversations."""
    return config.section(ConversationConfig).sft
