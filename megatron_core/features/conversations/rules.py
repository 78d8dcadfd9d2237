"""Rules of data files with conversations and preferences."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig

EXCLUDED = (
    *("mock_data", "fim_data", "eod_mask_loss", "reset_position_ids", "reset_attention_mask", "data_phases"),
    "seq_length_warmup",
)
"""Settings of token files, which conversations do not have."""


def conversation_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that do not apply to conversations."""
    data = config.data
    values = config.flat()
    if values["sft"] and values.get("dpo"):
        yield "sft=True and dpo=True exclude one another; keep one of them"
    if not (values["sft"] or values.get("dpo")):
        if data.chat_template is not None:
            yield (
                f"chat_template={data.chat_template} has no effect without --sft or --dpo; add --sft or --dpo or "
                "remove chat_template"
            )
        return
    assigned = [f"{name}={values[name]}" for name in EXCLUDED if values.get(name)]
    if data.data_order != "keyed":
        assigned.append(f"data_order={data.data_order}")
    if data.dataloader_type != "single":
        assigned.append(f"dataloader_type={data.dataloader_type}")
    if assigned:
        flag = "sft" if values["sft"] else "dpo"
        yield f"{flag}=True cannot be used with {' and '.join(assigned)}; each conversation is a document of its own"
