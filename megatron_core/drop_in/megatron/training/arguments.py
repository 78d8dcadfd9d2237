"""Parses the command line into a namespace."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.enums import AttnBackend
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.training.argument_utils import (
    ArgumentGroupFactory,
    core_transformer_config_from_args,
)
from megatron.training.config.training_config import TokenizerConfig, ValidationConfig
from megatron.training.global_vars import of_one_rank, set_global_variables
from megatron.training.run_config import (
    DTYPES,
    LAYER_PATTERNS,
    OTHER_DEFAULTS,
    SHOWN_DEFAULTS,
    TYPES_OF_TENSORS,
    run_config_of,
)
from megatron_core.checkpoint.reader import note
from megatron_core.config import DataConfig, ModelConfig, RunConfig
from megatron_core.config.cli import training_flags
from megatron_core.config.file import names_in
from megatron_core.config.flags import Translation, grouped, plain
from megatron_core.config.run import aliases, field_types
from megatron_core.config.validate import check, without_data
from megatron_core.features.layer_sizes.settings import LAYERS_JSON
from megatron_core.features.megatron_flags.tables import FLAGS, OVERRIDDEN_BY_FLAG, SAME_AS
from megatron_core.launcher import read_integer
from megatron_core.text_file import read_table
from megatron_core.training.pretrain import read_settings

_TABLES = read_table(__file__)
GENERATION: dict[str, Any] = _TABLES["generation"]
"""Defaults of Megatron-LM's flags of generation."""
DEFAULTS: dict[str, Any] = _TABLES["values"]
"""Values of flags that are not given, other than None and False."""
ATTRIBUTES: dict[str, tuple[str, Any]] = _TABLES["attributes"]
"""Attributes with another name than their flag: the flag, after ``not`` if it sets False, and the default."""


def parse_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None, ignore_unknown_args: bool = False
) -> Namespace:
    """Return all settings of the command line by name, with ``rank`` and ``world_size``.

    It includes the flags of ``extra_args_provider``. Raises ConfigError for a flag of neither project; with
    ``ignore_unknown_args`` a note names it, because it may be misspelt, and the words after ``--``.
    """
    given, extra = sys.argv[1:], Namespace()
    if extra_args_provider is not None:
        parser = extra_args_provider(ArgumentParser(add_help=False, allow_abbrev=False))
        extra, given = parser.parse_known_args(given)
    if ignore_unknown_args:
        end = given.index("--") if "--" in given else len(given)
        rest = given[end:]
        groups = list(Translation.each(given[:end], training_flags()))
        given = [word for words, part in groups if not part.unknown for word in words]
        unknown = [flag for _, part in groups for flag in part.unknown]
        if unknown or rest:
            note(
                "ignored, because they are flags of neither this project nor Megatron-LM: "
                f"{' '.join([*unknown, *rest])}"
            )
    # The program reads --spec, because only it knows these parts of a model; load_checkpoint reads the schedule.
    words = [word for flag, values in grouped(given) if plain(flag) != "spec" for word in (flag, *values)]
    config, _ = read_settings(Path(sys.argv[0]).name, words, stored_schedule=False)
    settings = config.flat()
    flags = {plain(flag): values for flag, values in grouped(given)}
    names = set(flags) | (names_in(flags["config"][-1]) if "config" in flags else set())
    if not names & {"calculate_per_token_loss", "no_calculate_per_token_loss"}:
        settings["calculate_per_token_loss"] = False  # Megatron-LM's default, which loss functions rely on
    own = RunConfig().flat()
    for name, default in (OTHER_DEFAULTS | SHOWN_DEFAULTS).items():
        if name not in names and settings[name] == own[name]:
            settings[name] = default
    for name in LAYER_PATTERNS:
        values = settings[name]  # programs test for an int or a list
        settings[name] = values and (values[0] if len(values) == 1 and values[0] else list(values))
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    backend = flags.get("attention_backend", [settings["attention_backend"]])[-1]
    settings["attention_backend"] = AttnBackend.__members__.get(backend, backend)
    args = Namespace(**_others(given, settings) | settings | vars(extra))
    if dist.is_initialized():
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    else:
        args.rank, args.world_size = read_integer("RANK", 0), read_integer("WORLD_SIZE", 1, least=1)
    args.fp8 = args.fp8_format
    # Programs choose the class of the configuration by the name of the file, whose content the engine has read.
    args.heterogeneous_layers_config_path = LAYERS_JSON if args.heterogeneous_layers_config_encoded_json else None
    _set_generation(args)
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = 0
    return args


def _adder(settings: type, title: str) -> Callable[[ArgumentParser], ArgumentParser]:
    """Return a function that adds ``settings`` as flags to the parser of a program."""

    def add(parser: ArgumentParser) -> ArgumentParser:
        ArgumentGroupFactory(settings).build_group(parser, title)
        return parser

    return add


_add_tokenizer_args = _adder(TokenizerConfig, "tokenizer")
_add_data_args = _adder(DataConfig, "data and dataloader")
_add_validation_args = _adder(ValidationConfig, "validation")
_add_network_size_args = _adder(ModelConfig, "network size")


def _set_generation(args: Namespace) -> None:
    """Set the defaults of the flags of generation; a server of Megatron-LM reads the second name of a length."""
    for name, value in GENERATION.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.inference_max_sequence_length = args.inference_max_seq_length


def _others(given: list[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of Megatron-LM's parser that are not settings of the engine, with its defaults.

    A flag that is another name of one of ``settings`` has its value. Without a default in ``arguments.yaml``, flags
    that are not given are None or False. ``--no-x`` and ``--disable-x`` also set x.
    """
    words, found = {plain(flag): values for flag, values in grouped(given)}, dict[str, Any]()
    for name, flag in FLAGS.items():
        found[name] = _value(words.get(name), DEFAULTS.get(name, None if flag.takes_values else False))
    for name in (*SAME_AS, *OVERRIDDEN_BY_FLAG, "export_kd_cfg"):
        found[name] = _value(words.get(name), None if name == "export_kd_cfg" else False)
    for name in FLAGS:
        for prefix in ("no_", "disable_"):
            if name.startswith(prefix) and (name in words or name.removeprefix(prefix) not in FLAGS):
                found[name.removeprefix(prefix)] = name not in words
    own = RunConfig().flat()
    for name, setting in aliases().items():
        is_default = settings[setting] == own[setting]
        found[name] = DEFAULTS.get(name, own[setting]) if is_default else settings[setting]
    for name, (source, default) in ATTRIBUTES.items():
        is_negated, source = source.startswith("not "), source.removeprefix("not ")
        value = settings[source] if source in settings else _value(words.get(source), False if is_negated else default)
        found[name] = not value if is_negated else value
    return found


def _value(words: list[str] | None, default: Any) -> Any:
    """The value of a flag with these words after it; ``default`` if it is not given."""
    if words is None:
        return default
    numbers = [int(word) if word.lstrip("-").isdigit() else word for word in words]
    return True if not numbers else numbers[0] if len(numbers) == 1 else numbers


def parse_and_validate_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    """Call ``parse_args``, ``validate_args`` and ``set_global_variables``.

    The next ``initialize_megatron()`` creates the groups of these arguments and does not read the command line again.
    """
    args = validate_args(parse_args(extra_args_provider, ignore_unknown_args), args_defaults)
    set_global_variables(args)
    args.waits_for_groups = True
    return args


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Check all settings except those of data, and set derived ones; ``defaults`` replace None.

    Derived are ``data_parallel_size``, ``global_batch_size``, ``ffn_hidden_size``, ``kv_channels``, ``params_dtype``
    and ``padded_vocab_size``. Raises ConfigError that lists all problems.
    """
    for name, value in (defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    _translate_attributes(args)
    config = run_config_of(args)
    check(without_data(config), args.world_size)
    model = config.model
    args.data_parallel_size = args.world_size // config.parallel.model_parallel_size
    args.global_batch_size = config.training.final_batch_size(args.data_parallel_size)
    args.eval_global_batch_size = config.training.evaluation_batch_size(args.data_parallel_size)
    args.ffn_hidden_size, args.kv_channels = model.ffn_size, model.head_size
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16 and not getattr(args, "grad_reduce_in_bf16", False)
    if args.num_experts is not None and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    args.max_position_embeddings = config.max_positions
    args.params_dtype = getattr(torch, config.training.compute_dtype)
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    for name in TYPES_OF_TENSORS:
        setattr(args, name, DTYPES.get(getattr(args, name), getattr(args, name)))
    updates_matrices = config.optimizer.kind_of(hidden=True).scalar_optimizer is not None
    args.use_layer_wise_distributed_optimizer = updates_matrices and config.parallel.dp_zero_stage == 1
    chunks = config.parallel.num_chunks(model.num_layers)
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    args.eval_micro_batch_size = args.micro_batch_size
    if args.vocab_size is not None and getattr(args, "padded_vocab_size", None) is None:
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, of_one_rank(args))
    return args


def _translate_attributes(args: Namespace) -> None:
    """Set the settings that Megatron-LM's ``validate_args`` derives from attributes that a program has set itself.

    On the command line these names are flags, which ``parse_args`` translates.
    """
    if getattr(args, "use_rotary_position_embeddings", False):
        args.position_embedding_type = "rope"
    if getattr(args, "recompute_activations", False):
        args.recompute_granularity = "selective"
    if isinstance(getattr(args, "attention_backend", None), bool):  # of accelerate
        args.attention_backend = AttnBackend.auto
    if getattr(args, "orig_vocab_size", None) is not None:  # of accelerate, whose loaders yield token ids
        args.vocab_size, args.tokenizer_type = args.orig_vocab_size, "NullTokenizer"
