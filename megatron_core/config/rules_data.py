"""Rules for data sources, the tokenizer, checkpoints and bad steps."""

import math
import os.path
from collections.abc import Iterator

from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.data import DataConfig
from megatron_core.config.rule_helpers import exclusive, shown
from megatron_core.config.run import RunConfig

_TOKENIZER_FILES = {
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": ("vocab_size",),
}


def given_sources(data: DataConfig) -> list[str]:
    """The given sources of tokens; exactly one must be."""
    undivided = ("train_data_path", "per_split_data_args_path", "mock_data")
    return [*data.divided_sources, *(name for name in undivided if getattr(data, name))]


def data_problems(config: RunConfig) -> Iterator[str]:
    """Check that there is exactly one source of tokens, and that splits, blends and orders fit it."""
    data = config.data
    held_out = ("valid_data_path", "test_data_path")
    sources = given_sources(data)
    if config.training.skip_train and not data.train_data_path:
        sources += [name for name in held_out if getattr(data, name)][:1]
    if not sources and data.dataloader_type != "external":
        yield "data_path=() leaves the run without data; give one of --data-path, --train-data-path, --mock-data"
    if sources and data.dataloader_type == "external":
        yield (
            f"dataloader_type=external takes the datasets of your script, but {sources[0]}="
            f"{shown(getattr(data, sources[0]))} names others; remove one of them"
        )
    if len(sources) > 1:
        yield exclusive(*(f"{name}={shown(getattr(data, name))}" for name in sources))
    for name in held_out:
        paths = getattr(data, name)
        if paths and not data.train_data_path and not config.training.skip_train:
            yield (
                f"{name}={shown(paths)} needs train_data_path; give it, or use --data-path with --split, or only "
                "evaluate with --skip-train"
            )
    if data.split is not None:
        yield from _split_problems(config)
    if data.dataloader_type == "cyclic" and data.mock_data:
        yield "dataloader_type=cyclic repeats the samples of an epoch, but mock_data=True has no epochs; use single"
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        yield from _blend_problems(name, getattr(data, name))
    yield from _evaluation_problems(config)


def _evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Settings of validation sets that contradict one another."""
    data = config.data
    if data.multiple_validation_sets and not (data.valid_data_path or data.per_split_data_args_path):
        yield (
            "multiple_validation_sets=True needs files of their own; give --valid-data-path or "
            "--per-split-data-args-path"
        )
    if data.multiple_validation_sets and any(_number(path) is not None for path in data.valid_data_path):
        yield (
            f"valid_data_path={shown(data.valid_data_path)} has weights, and with multiple_validation_sets=True each "
            "file is evaluated alone; remove them"
        )
    names = data.validation_set_names
    if names and (len(set(names)) < len(names) or len(names) != len(data.valid_data_path or names)):
        yield f"validation_set_names={shown(names)} must be different, one for each file of --valid-data-path"


def _number(text: str) -> float | None:
    """The number in ``text``, or ``None``."""
    try:
        return float(text)
    except ValueError:
        return None


def _split_problems(config: RunConfig) -> Iterator[str]:
    """The shares of train, validation and test."""
    data = config.data
    if not data.mock_data and not data.divided_sources:
        yield f"split={data.split} applies only to data_path, which is not given; remove it"
    shares = [_number(number) for number in (data.split or "").split(",")]
    sound = [share for share in shares if share is not None and 0 <= share < math.inf]
    if len(sound) != len(shares) or len(shares) > 3 or not sound[0] > 0:
        yield f"split={data.split} is not legal; give one to three shares, the first above 0, such as 969,30,1"


def _blend_problems(name: str, paths: tuple[str, ...]) -> Iterator[str]:
    """Faults of a blend: a list of paths with a number in at least one position of a weight."""
    weights = [_number(path) for path in paths[::2]]
    numbers = [weight for weight in weights if weight is not None]
    if len(paths) < 2 or not numbers:
        return
    if len(paths) % 2 or len(numbers) < len(weights):
        yield (
            f"{name}={shown(paths)} has weights, but is not of the form weight prefix weight prefix ...; "
            "give every prefix a weight, or none (write ./7 for a prefix 7)"
        )
    elif not all(0 < weight < math.inf for weight in numbers):
        yield f"{name}={shown(paths)} has a weight that is not a number above 0; leave that dataset out"


def tokenizer_problems(config: RunConfig) -> Iterator[str]:
    """Check that the size of the vocabulary is known, and that a tokenizer has its files."""
    data = config.data
    if data.tokenizer is None and data.vocab_size is None:
        yield (
            "tokenizer_type=None and vocab_size=None: the size of the vocabulary is unknown; give one of them, or "
            "--vocab-file and --merge-file"
        )
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(data, name) and data.tokenizer is None:
            yield f"{name}=True needs the end-of-document id of a tokenizer; give --tokenizer-type or remove it"
    for name in _TOKENIZER_FILES.get(data.tokenizer or "", ()):
        if getattr(data, name) is None:
            flag = "--" + name.replace("_", "-")
            yield f"{name}=None is missing for tokenizer_type={data.tokenizer_type}; give {flag}"


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Contradictory folders of checkpoints, and unknown names of model settings."""
    checkpoint = config.checkpoint
    if checkpoint.non_persistent_ckpt_type == "global":
        yield from fast_restart_problems(checkpoint, "non_persistent_global_ckpt_dir")
    unknown = tuple(name for name in checkpoint.changed_model_settings if not hasattr(config.model, name))
    if unknown:
        yield (f"changed_model_settings={shown(unknown)} names no setting of the model; give names such as rotary_base")


def fast_restart_problems(checkpoint: CheckpointConfig, setting: str) -> Iterator[str]:
    """A folder of checkpoints for a fast restart, the value of ``setting``, that is the folder of --save."""
    folder = getattr(checkpoint, setting)
    if folder and checkpoint.save and os.path.normpath(folder) == os.path.normpath(checkpoint.save):
        yield (
            f"{setting}={folder} is the folder of --save, where a checkpoint for a fast restart would replace the "
            "permanent ones; give another folder"
        )


def bad_step_problems(config: RunConfig) -> Iterator[str]:
    """Bad steps that are skipped must be noticed."""
    steps = config.resilience.max_bad_steps
    if steps and not config.training.check_for_nan_in_loss_and_grad:
        yield exclusive(f"max_bad_steps={steps}", "check_for_nan_in_loss_and_grad=False")
