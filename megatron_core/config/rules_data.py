"""Rules for data sources, the tokenizer and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_core.config.run import RunConfig

_TOKENIZER_FILES = {
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": ("vocab_size",),
}
_FIM_NEEDS = {
    "fim_split_sample": ("fim_data", "fim_fragment_rate"),
    "fim_fragment_rate": ("fim_data", "fim_split_sample"),
    "fim_no_prefix": ("fim_data",),
    "fim_eod_token": ("fim_data",),
}


# The sources of tokens, of which exactly one must be given; --split applies to those in DIVIDED.
DIVIDED = ("data_path", "data_args_path", "data_phases")
SOURCES = (*DIVIDED, "train_data_path", "per_split_data_args_path", "mock_data")


def data_problems(config: RunConfig) -> Iterator[str]:
    """Check that there is exactly one source of tokens, and that splits, blends and orders fit it."""
    data = config.data
    held_out = ("valid_data_path", "test_data_path")
    given = [name for name in SOURCES if getattr(data, name)]
    if config.training.skip_train and not data.train_data_path:
        given += [name for name in held_out if getattr(data, name)][:1]
    if not given and data.dataloader_type != "external":
        yield "data_path=() leaves the run without data; give one of --data-path, --train-data-path, --mock-data"
    if given and data.dataloader_type == "external":
        yield (
            f"dataloader_type=external takes the datasets of your script, but {given[0]}="
            f"{_shown(getattr(data, given[0]))} names others; remove one of them"
        )
    if len(given) > 1:
        shown = " and ".join(f"{name}={_shown(getattr(data, name))}" for name in given)
        yield f"{shown} exclude one another; keep one of them"
    for name in held_out:
        paths = getattr(data, name)
        if paths and not data.train_data_path and not config.training.skip_train:
            yield (
                f"{name}={_shown(paths)} needs train_data_path; give it, or use --data-path with --split, or only "
                "evaluate with --skip-train"
            )
    if data.split is not None:
        yield from _split_problems(config)
    yield from _order_problems(config)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        yield from _blend_problems(name, getattr(data, name))
    yield from _fim_problems(config)
    yield from _sft_problems(config)


def _shown(value: object) -> str:
    """A value as on the command line."""
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _number(text: str) -> float | None:
    """The number in ``text``, or ``None``."""
    try:
        return float(text)
    except ValueError:
        return None


def _order_problems(config: RunConfig) -> Iterator[str]:
    """Settings that contradict the order of samples."""
    data = config.data
    endless = [name for name in ("mock_data", "data_phases") if getattr(data, name)]
    if data.dataloader_type == "cyclic" and endless:
        shown = f"{endless[0]}={getattr(data, endless[0])}"
        yield f"dataloader_type=cyclic repeats the samples of an epoch, but {shown} has no epochs; use single"
    if data.data_order == "megatron" and data.data_phases is not None:
        yield (
            f"data_phases={data.data_phases} needs data_order=keyed, which can start at any sample; "
            "remove --data-order megatron"
        )


def _split_problems(config: RunConfig) -> Iterator[str]:
    """The shares of train, validation and test."""
    data = config.data
    if not data.mock_data and not any(getattr(data, name) for name in DIVIDED):
        yield f"split={data.split} applies only to data_path, which is not given; remove it"
    shares = [_number(part) for part in (data.split or "").split(",")]
    sound = [share for share in shares if share is not None and 0 <= share < math.inf]
    if len(sound) != len(shares) or len(shares) > 3 or not sound[0] > 0:
        yield f"split={data.split} is not legal; give one to three shares, the first above 0, such as 969,30,1"


def _blend_problems(name: str, paths: tuple[str, ...]) -> Iterator[str]:
    """Faults of a blend, which is a list with a number in the position of some weight."""
    weights = [_number(path) for path in paths[::2]]
    given = [weight for weight in weights if weight is not None]
    if len(paths) < 2 or not given:
        return
    if len(paths) % 2 or len(given) < len(weights):
        yield (
            f"{name}={_shown(paths)} has weights, but is not of the form weight prefix weight prefix ...; "
            "give every prefix a weight, or none (write ./7 for a prefix 7)"
        )
    elif not all(0 < weight < math.inf for weight in given):
        yield f"{name}={_shown(paths)} has a weight that is not a number above 0; leave that dataset out"


def tokenizer_problems(config: RunConfig) -> Iterator[str]:
    """Check that the size of the vocabulary is known, and that a tokenizer has its files."""
    data = config.data
    if data.tokenizer is None and data.vocab_size is None:
        yield (
            "tokenizer_type=None and vocab_size=None: the size of the vocabulary is unknown; give one of them, or "
            "--vocab-file and --merge-file"
        )
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
        if getattr(data, name) and data.tokenizer is None:
            yield f"{name}=True needs the end-of-document id of a tokenizer; give --tokenizer-type or remove it"
    for name in _TOKENIZER_FILES.get(data.tokenizer or "", ()):
        if getattr(data, name) is None:
            flag = "--" + name.replace("_", "-")
            yield f"{name}=None is missing for tokenizer_type={data.tokenizer_type}; give {flag}"


def _sft_problems(config: RunConfig) -> Iterator[str]:
    """Conversations, whose samples are made in one way."""
    data = config.data
    if data.chat_template is not None and not data.sft:
        yield f"chat_template={data.chat_template} has no effect without sft; add --sft or remove it"
    others = ("mock_data", "fim_data", "eod_mask_loss", "reset_position_ids", "reset_attention_mask", "data_phases")
    if data.sft:
        said = [f"{name}={getattr(data, name)}" for name in (*others, "seq_length_warmup") if getattr(data, name)]
        said += [f"data_order={data.data_order}"] * (data.data_order != "keyed")
        said += [f"dataloader_type={data.dataloader_type}"] * (data.dataloader_type != "single")
        if said:
            yield f"sft=True cannot be used with {' and '.join(said)}; conversations are documents of their own already"


def _fim_problems(config: RunConfig) -> Iterator[str]:
    """Fill-in-the-middle: rates outside 0 to 1, and settings without the switch that they need."""
    data = config.data
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        rate = getattr(data, name)
        if rate is not None and not 0 <= rate <= 1:
            yield f"{name}={rate} is not a share; legal: 0 to 1"
    for name, needs in _FIM_NEEDS.items():
        missing = [need for need in needs if getattr(data, need) in (None, False)]
        if getattr(data, name) is not None and missing:
            flag = "--" + missing[0].replace("_", "-")
            yield f"{name}={getattr(data, name)} has no effect without {missing[0]}; give {flag} or remove it"


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Settings of saving and loading that have no effect without a folder, and unknown names of model settings."""
    checkpoint = config.checkpoint
    needs = {
        "save_retain_interval": "save",
        "keep_last": "save",
        "overwrite_checkpoints": "save",
        "async_save": "save",
        "non_persistent_save_interval": "save",
        "ckpt_step": "load",
        "use_checkpoint_args": "load",
        "finetune": "load",
        "changed_model_settings": "load",
    }
    for name, folder in needs.items():
        value = getattr(checkpoint, name)
        if value not in (None, False, ()) and getattr(checkpoint, folder) is None:
            yield f"{name}={_shown(value)} has no effect without {folder}; add --{folder} FOLDER or remove it"
    for name in ("save", "load", "load_hf", "non_persistent_global_ckpt_dir"):
        if getattr(checkpoint, name) == "":
            yield f"{name}='' names no folder; give one (. is the current one), or leave the flag out"
    if checkpoint.non_persistent_global_ckpt_dir is not None and checkpoint.non_persistent_save_interval is None:
        yield (
            f"non_persistent_global_ckpt_dir={checkpoint.non_persistent_global_ckpt_dir} has no effect without "
            "non_persistent_save_interval; give both or neither"
        )
    unknown = [name for name in checkpoint.changed_model_settings if not hasattr(config.model, name)]
    if unknown:
        yield f"changed_model_settings={_shown(tuple(unknown))}: no setting of the model; give names as rotary_base"
