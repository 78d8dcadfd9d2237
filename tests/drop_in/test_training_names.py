"""Names of ``megatron.training``: arguments, configurations, counts of a batch, and folders of checkpoints."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron.core.enums import AttnBackend
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, squared_relu
from megatron.training import get_args, get_timers, get_tokenizer, get_train_valid_test_num_samples
from megatron.training.argument_utils import (
    ArgumentGroupFactory,
    TypeInferenceError,
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import ATTRIBUTES, DEFAULTS, parse_args, run_config_of, validate_args
from megatron.training.checkpointing import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    read_frozen_resume_iteration,
    read_metadata,
)
from megatron.training.config import ValidationConfig
from megatron.training.global_vars import destroy_global_vars, set_args, set_global_variables
from megatron.training.training import (
    consume_seqlen_stats_in_iteration,
    num_floating_point_operations,
    update_seqlen_stats_from_cu_seqlens,
)
from megatron.training.utils import get_ltor_masks_and_position_ids
from megatron_core.config import RunConfig
from megatron_core.config.flops import flops_per_token
from megatron_core.config.run import aliases
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.megatron_flags.tables import FLAGS, OVERRIDDEN_BY_FLAG, SAME_AS

COMMAND = "x.py --num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 100 --tokenizer-type NullTokenizer"


def test_every_flag_has_its_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read attributes of flags that are translated or have no effect; defaults are Megatron-LM's."""
    monkeypatch.setattr(sys, "argv", COMMAND.split())
    args = vars(parse_args())
    absent = {*FLAGS, *aliases(), *SAME_AS, *OVERRIDDEN_BY_FLAG, *ATTRIBUTES, *DEFAULTS, "export_kd_cfg"} - args.keys()
    assert not absent
    expected = {
        **{"layernorm_epsilon": 1e-5, "add_bias_linear": True, "encoder_num_layers": 4, "rotary_scaling_factor": 1.0},
        **{"export_kd_cfg": None, "recompute_activations": False, "bias_dropout_fusion": True, "exit_signal": 15},
        **{"transformer_impl": "transformer_engine", "no_load_rng": None, "barrier_with_L1_time": True, "fp4": None},
    }
    assert {name: args[name] for name in expected} == expected
    given = (
        "--norm-epsilon 1e-6 --disable-bias-linear --recompute-activations --no-bias-dropout-fusion "
        "--tensorboard-log-interval 5 --no-barrier-with-level-1-timing --apply-layernorm-1p "
        "--encoder-seq-length 16 --no-load-rng"
    )
    monkeypatch.setattr(sys, "argv", [*COMMAND.split(), *given.split()])
    expected = {
        **{
            "layernorm_epsilon": 1e-6,
            "add_bias_linear": False,
            "recompute_activations": True,
            "tensorboard_log_interval": 5,
        },
        **{"bias_dropout_fusion": False, "barrier_with_L1_time": False, "layernorm_zero_centered_gamma": True},
        **{"encoder_seq_length": 16, "no_load_rng": True},
    }
    args = vars(parse_args())
    assert {name: args[name] for name in expected} == expected


@dataclass
class Base:
    """Settings."""

    size: int = 3
    """How large,
    at 100 %."""


@dataclass
class Settings(Base):
    """More settings."""

    kind: Literal["a", "b"] = "a"
    fast: bool = False
    safe: bool = True
    sizes: list[int] = field(default_factory=lambda: [1])
    rate: float | None = None
    odd: int | str = field(default=0, metadata={"argparse_meta": {"type": str, "arg_names": ["--strange"]}})


def test_flags_of_a_dataclass() -> None:
    parser, factory = ArgumentParser(), ArgumentGroupFactory(Settings, exclude=["kind"])
    assert factory.build_group(parser, title="T").description == "More settings."
    assert factory.field_docstrings == {"size": "How large, at 100 %."}
    assert "at 100 %." in parser.format_help()
    assert vars(parser.parse_args([])) == {
        **{"size": 3, "fast": False, "safe": True, "sizes": [1], "rate": None, "odd": 0}
    }
    args = parser.parse_args(
        ["--size=5", "--fast", "--disable-safe", "--sizes", "2", "3", "--rate=1e-3", "--strange=x"]
    )
    assert vars(args) == {"size": 5, "fast": True, "safe": False, "sizes": [2, 3], "rate": 1e-3, "odd": "x"}


def test_a_type_that_says_nothing_is_an_error() -> None:
    @dataclass
    class Unclear:
        either: int | str = 0

    with pytest.raises(TypeInferenceError, match="Unions not supported"):
        ArgumentGroupFactory(Unclear).build_group(ArgumentParser())


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Arguments of a command line that has a flag of the program."""

    def extra(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--my-flag", type=int)
        return parser

    more = "--swiglu --bf16 --train-iters 10 --global-batch-size 8 --micro-batch-size 2 --seq-length 16 --my-flag 7"
    monkeypatch.setattr(sys, "argv", f"{COMMAND} {more}".split())
    return validate_args(parse_args(extra), {"eval_interval": 5})


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (
            "",
            {"attention_backend": AttnBackend.auto, "data_path": None, "iterations_to_skip": [], "num_query_groups": 1},
        ),
        (
            "--num-experts 4",
            {"moe_token_dispatcher_type": "allgather", "moe_router_dtype": None, "moe_ffn_hidden_size": 128}
            | {"moe_router_load_balancing_type": "aux_loss", "tp_comm_overlap": False, "recompute_modules": None},
        ),
        (
            "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --attention-backend flash "
            "--cp-comm-type p2p --train-data-path a b",
            {"moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32", "cp_comm_type": ["p2p"]}
            | {"attention_backend": AttnBackend.flash, "train_data_path": ["a", "b"], "data_path": None},
        ),
    ],
)
def test_arguments_have_megatrons_values(flags: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those that Megatron-LM's parser of August 2026 has for the same flags."""
    steps = "--train-iters 10 --micro-batch-size 2 --seq-length 16"
    monkeypatch.setattr(sys, "argv", f"{COMMAND} {steps} {flags}".split())
    args = validate_args(parse_args())
    assert {name: getattr(args, name) for name in values} == values
    config = run_config_of(args)
    assert config.data.data_path == () and config.model.attention_backend == "auto"
    assert config.optional("moe_router_dtype") == "fp32" and config.model.num_query_groups is None
    is_sparse = args.num_experts is not None
    assert config.optional("moe_router_load_balancing_type") == ("aux_loss" if is_sparse else "seq_aux_loss")


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ("--group-query-attention --num-query-groups 1", 1),
        ("--group-query-attention --num-query-groups 2", 2),
        ("", None),
    ],
)
def test_groups_of_queries_are_those_of_the_program(
    flags: str, groups: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--num-layers", "2", "--num-attention-heads", "4", *flags.split()])
    assert run_config_of(parse_args()).model.num_query_groups == groups


def test_values_without_a_declared_type_are_numbers_if_they_can_be() -> None:
    parser = ArgumentParser()
    ArgumentGroupFactory(ValidationConfig).build_group(parser)
    assert parser.parse_args(["--start-eval-at-iter", "100"]).start_eval_at_iter == 100


def test_unknown_flags_are_ignored_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "--my-size 4 --swiglu --my-kind grpo word --seed 5 --my-switch -- x --y"
    monkeypatch.setattr(sys, "argv", f"{COMMAND} {more}".split())
    args = parse_args(ignore_unknown_args=True)
    assert (args.swiglu, args.seed, args.hidden_size) == (True, 5, 32)
    said = "--my-size --my-kind --my-switch -- x --y"
    assert f"flags of neither this project nor Megatron-LM: {said}\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--my-size 4: neither a flag"):
        parse_args()


def test_arguments_of_the_command_line(args: Namespace) -> None:
    assert (args.my_flag, args.eval_interval, args.data_parallel_size) == (7, 5, 1)
    assert (
        args.ffn_hidden_size
        == RunConfig.from_flat(RunConfig().flat() | {"hidden_size": 32, "swiglu": True}).model.ffn_size
    )
    assert (args.kv_channels, args.params_dtype, args.padded_vocab_size) == (8, torch.bfloat16, 128)
    assert run_config_of(args).training.global_batch_size == 8
    config = core_transformer_config_from_args(args)
    assert config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    assert (config.num_query_groups, config.params_dtype, config.pipeline_dtype) == (4, torch.bfloat16, torch.bfloat16)
    # Values of Megatron's own kinds, which a program sets on the arguments.
    args.attention_backend, args.moe_layer_freq = AttnBackend.local, 1
    args.position_embedding_type, args.no_rope_freq = "rope", [0, 1, 0, 1]
    model = run_config_of(validate_args(args)).model
    assert (model.attention_backend, model.moe_layer_freq, model.no_rope_freq) == ("unfused", (1,), (0, 1, 0, 1))
    args.attention_backend = AttnBackend.flash
    assert run_config_of(validate_args(args)).model.attention_backend == "auto"
    args.micro_batch_size = 3
    with pytest.raises(ConfigError, match="global_batch_size=8"):
        validate_args(args)


def test_configurations_of_other_arguments() -> None:
    given = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "norm_epsilon": 1e-6, "num_experts": 8}
    config = core_transformer_config_from_args(Namespace(**given, multi_latent_attention=True, squared_relu=True))
    assert isinstance(config, MLATransformerConfig) and config.activation_func is squared_relu
    assert (config.layernorm_epsilon, config.num_moe_experts) == (1e-6, 8)


def test_what_is_kept_of_the_process(args: Namespace) -> None:
    set_global_variables(args)
    assert get_args() is args
    assert get_tokenizer().vocab_size == 100
    get_timers()("step").start()
    assert get_train_valid_test_num_samples() == (80, 3 * 10 * 8, 10 * 8)
    destroy_global_vars()
    with pytest.raises(ConfigError, match="args is not initialized"):
        get_args()


def test_sizes_of_evaluations() -> None:
    common = {"train_samples": 100, "train_iters": None, "global_batch_size": 10, "eval_iters": 3}
    set_args(Namespace(**common, eval_interval=4, eval_global_batch_size=5, skip_train=False))
    assert get_train_valid_test_num_samples() == (100, 3 * 3 * 5, 3 * 5)
    destroy_global_vars()


def test_sections_of_a_run_and_back() -> None:
    args = Namespace(**RunConfig().flat() | {"lr": 0.5, "no_save_optim": True, "bf16": True, "train_iters": 7})
    args.lr_decay_style, args.profile_ranks, args.tensorboard_dir = "cosine", (1,), "logs"
    container = pretrain_cfg_container_from_args(args)
    assert container.checkpoint.save_optim is False
    assert container.optimizer.lr == 0.5
    config = container.run_config()
    flat = config.flat()
    expected = {"lr": 0.5, "no_save_optim": True, "train_iters": 7, "lr_decay_style": "cosine", "profile_ranks": (1,)}
    assert {name: flat[name] for name in expected} == expected
    assert config.value("tensorboard_dir") == "logs"


def _shape(**changes: object) -> Namespace:
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "swiglu": True}
    return Namespace(**sizes | {"seq_length": 32, "padded_vocab_size": 128, "moe_layer_freq": 1} | changes)


def test_attributes_that_megatron_derives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of tensors and both weight decays; slime changes the default of a refinement of a mode that is off."""
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    flags = f"{sizes} --micro-batch-size 1 --vocab-size 64 --bf16 --lr 0.1 --output-logit-dtype fp32 --weight-decay 0.3"
    monkeypatch.setattr(sys, "argv", ["program", *flags.split()])
    args = parse_args()
    assert (args.main_grads_dtype, args.logit_dtype, args.start_weight_decay) == ("fp32", "fp32", None)
    args.mtp_loss_scaling_factor = 0.2
    args = validate_args(args)
    types = [getattr(args, f"{name}_dtype") for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq", "logit")]
    assert types == [torch.float32] * 5
    assert args.mamba_inference_ssm_states_dtype == torch.bfloat16
    assert args.start_weight_decay == args.end_weight_decay == 0.3
    again = run_config_of(validate_args(args))
    assert (again.optimizer.exp_avg_dtype, again.optimizer.start_weight_decay) == ("fp32", None)
    known = {item.name for item in fields(OptimizerConfig)}
    optimizer = OptimizerConfig(**{name: value for name, value in vars(args).items() if name in known})
    assert optimizer.translated().weight_decay == 0.3


def test_operations_of_a_batch() -> None:
    args = _shape()
    attention = 6 * 3 * 64  # for each pair of tokens: 2 products, 2 operations, 3 passes, half of the pairs
    whole = num_floating_point_operations(args, 5)
    assert whole - num_floating_point_operations(args, 5, seqlen_squared_sum_in_batch=0) == attention * 5 * 32 * 32
    linear = 6 * (3 * (64 * 3 * 64 + 64 * 64 + 3 * 64 * 96) + 64 * 128)
    assert num_floating_point_operations(args, 5, 100, 0) == linear * 100
    one_of_three = num_floating_point_operations(_shape(hybrid_layer_pattern="*--"), 5)
    attention, linear = 6 * 64, 6 * (64 * 3 * 64 + 64 * 64 + 2 * 3 * 64 * 96 + 64 * 128)
    assert one_of_three == 5 * (linear * 32 + attention * 32 * 32)
    # The work of a recurrence is a multiple of the tokens.
    recurrent = partial(num_floating_point_operations, _shape(hybrid_layer_pattern="M--", mamba_head_dim=16), 5)
    assert recurrent(100, 0) == recurrent(100, 7) == recurrent(200, 0) // 2 > 0


def test_all_keys_of_config_flops_are_twice_as_many() -> None:
    settings = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 96, "swiglu": True}
    model = RunConfig.from_flat(RunConfig().flat() | settings).model
    ours = flops_per_token(model, 32, 128) * 5 * 32
    theirs = num_floating_point_operations(_shape(), 5, seqlen_squared_sum_in_batch=2 * 5 * 32 * 32)
    assert ours == theirs


def test_lengths_of_documents() -> None:
    assert consume_seqlen_stats_in_iteration() == (None, None)
    for borders in ([0, 100, 250], [0, 50], [0]):
        update_seqlen_stats_from_cu_seqlens(torch.tensor(borders))
    update_seqlen_stats_from_cu_seqlens(None)
    assert consume_seqlen_stats_in_iteration() == (300, 100**2 + 150**2 + 50**2)
    assert consume_seqlen_stats_in_iteration() == (None, None)


def test_folders_of_checkpoints(tmp_path: Path) -> None:
    assert read_frozen_resume_iteration(str(tmp_path)) == read_frozen_resume_iteration(None) == 0
    tracker = Path(get_checkpoint_tracker_filename(str(tmp_path)))
    for text, found in (("1500\n", (1500, False)), ("release", (0, True))):
        tracker.write_text(text)
        assert read_metadata(str(tracker)) == found
        assert read_frozen_resume_iteration(str(tmp_path)) == found[0]
    tracker.write_text("x")
    with pytest.raises(CheckpointError, match="contains 'x'"):
        read_metadata(str(tracker))
    assert get_checkpoint_name("a", 12, return_base_dir=True) == "a/iter_0000012"
    name = get_checkpoint_name("a", 12, pipeline_parallel=True, tensor_rank=1, pipeline_rank=2)
    assert name == "a/iter_0000012/mp_rank_01_002/model_optim_rng.pt"


def test_a_program_of_ones_own_starts() -> None:
    code = (
        "import megatron_core.drop_in\n"
        "from megatron.core import mpu\n"
        "from megatron.training import get_args, initialize_megatron, print_rank_0\n"
        "from megatron.core.tensor_parallel.random import current_seed\n"
        "initialize_megatron(args_defaults={'tokenizer_type': 'NullTokenizer'})\n"
        "print_rank_0((mpu.get_data_parallel_world_size(), get_args().padded_vocab_size, current_seed()))\n"
    )
    command = [sys.executable, "-c", code, "--vocab-size", "100", "--seed", "5", "--distributed-backend", "gloo"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == ["(1, 128, 5)"], found.stderr


def test_arguments_that_were_parsed_before_are_used() -> None:
    code = (
        "import megatron_core.drop_in\n"
        "from megatron.training import get_args, initialize_megatron\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "def extra(parser):\n"
        "    parser.add_argument('--words', nargs='+')\n"
        "    return parser\n"
        "parse_and_validate_args(extra_args_provider=extra)\n"
        "initialize_megatron()\n"
        "args = get_args()\n"
        "print(args.words, args.inference_max_requests, args.inference_max_seq_length)\n"
    )
    command = [sys.executable, "-c", code, "--words", "a", "b", "--inference-max-requests", "3"]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    found = subprocess.run([*command, "--distributed-backend", "gloo"], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == ["['a', 'b'] 3 2560"], found.stderr


@pytest.mark.parametrize("reset", [False, True])
def test_masks_and_positions_of_documents(reset: bool) -> None:
    data = torch.tensor([[5, 0, 6, 7, 0, 9]])  # 0 ends a document, 9 is padding
    mask, counted, positions = get_ltor_masks_and_position_ids(data, 0, 9, reset, reset, reset, reset)
    documents = [0, 0, 1, 1, 1, 2] if reset else [0] * 6
    seen = [[k <= q and documents[k] == documents[q] for k in range(6)] for q in range(6)]
    assert (~mask[0, 0]).tolist() == seen
    assert counted.tolist() == [[1.0, 0.0, 1.0, 1.0, 0.0, 0.0] if reset else [1.0] * 6]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0] if reset else [0, 1, 2, 3, 4, 5]]
