"""Megatron-LM's ``pretrain``, with the arguments of all its releases, and the model of its programs."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import get_model_config
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.config.container import PretrainConfigContainer
from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron, start_groups
from megatron_core.errors import ConfigError

_DATA, _MODEL = "train_valid_test_dataset_provider", "model_provider"
_KIND, _STEP = "model_type", "forward_step_func"


def pretrain(*given: Any, **named: Any) -> None:
    """Create groups, model, optimizer and data, train and evaluate. Arguments by position, or by name in ``named``::

        data_provider, model_provider, model_type, forward_step    # releases up to 0.17: reads the command line
        cfg_container, data_provider, model_provider, model_type, forward_step    # 0.18
        cfg_container, data_provider, model_type, forward_step, model_provider=None    # newer releases

    ``process_non_loss_data_func`` follows, and up to 0.17 also ``extra_args_provider`` and ``args_defaults``. Without
    ``model_provider``, ``cfg_container.model`` builds the model. Other arguments (``get_embedding_ranks``, ``store``
    ...) have no effect. Raises ConfigError if ``cfg_container`` differs from the command line.
    """
    has_container = "cfg_container" in named or any(isinstance(each, PretrainConfigContainer) for each in given[:1])
    order = [_DATA, _MODEL, _KIND, _STEP, "process_non_loss_data_func"]
    if has_container:
        if any(isinstance(each, ModelType) for each in given[2:3]):
            order[1:4] = [_KIND, _STEP, _MODEL]
        order = ["cfg_container", *order]
    else:
        order += ["extra_args_provider", "args_defaults"]
    named |= dict(zip(order, given, strict=False))
    model_provider = named.get(_MODEL)
    if has_container:
        container = named["cfg_container"]
        _check(container)
        model_provider = model_provider or partial(_build, container.model)
        start_groups(get_args())
    else:
        initialize_megatron(named.get("extra_args_provider"), named.get("args_defaults"))
    assert model_provider is not None, "the releases without a container always pass it"
    _run(named[_DATA], model_provider, named[_KIND], named[_STEP], named.get("process_non_loss_data_func"))


def _check(container: PretrainConfigContainer) -> None:
    """Raise ConfigError for settings that a program changed in the container: the run reads the command line."""
    expected, changed = pretrain_cfg_container_from_args(get_args()), list[str]()
    for section in (each.name for each in fields(container) if each.name != "model"):
        ours, theirs = getattr(expected, section), getattr(container, section)
        changed += [
            f"{section}.{each.name}={getattr(theirs, each.name)!r}"
            for each in fields(theirs)
            if getattr(ours, each.name) != getattr(theirs, each.name)
        ]
    if changed:
        raise ConfigError(f"pretrain: {', '.join(changed)} differs from the command line; use the flags instead")


def _build(config: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    if config is None:
        raise ConfigError("pretrain: model_provider=None without a model in the container; pass gpt_config_from_args()")
    builder = config.get_builder_cls()(config)
    return builder.build_model(None, pre_process, post_process, vp_stage)


def _run(
    data_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Callable[..., Any] | None,
) -> None:
    # Imported on use: ``pretrain`` is one of the names of this module, too.
    from megatron.training import training

    args = get_args()
    model, optimizer, scheduler = training.setup_model_and_optimizer(model_provider, model_type)
    data, *held_out = training.build_train_valid_test_data_iterators(data_provider)
    others = (process_non_loss_data_func, get_model_config(model[0]))
    if not args.skip_train:
        training.train(forward_step_func, model, optimizer, scheduler, data, held_out[0], *others)
    for name, there, iterator in zip(("validation", "test"), (args.do_valid, args.do_test), held_out, strict=True):
        if there and args.eval_iters:
            where = f"iteration {args.iteration} on {name} set"
            training.evaluate_and_print_results(where, forward_step_func, iterator, model, args.iteration, *others)


def gpt_builder(
    args: Namespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build a stage of the GPT of ``args``; ``config`` is a ``TransformerConfig`` or None for that of ``args``."""
    settings = gpt_config_from_args(args, config)
    return settings.get_builder_cls()(settings).build_model(pg_collection, pre_process, post_process, vp_stage)


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Return ``pretrain`` unchanged and no store; the command line reports ``--inprocess-restart``."""
    return pretrain, None
