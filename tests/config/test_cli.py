"""The command line: Megatron-LM's flags are parsed into one frozen configuration."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.cli import parse_command_line, parse_run_config, refinements
from megatron_core.config.flags import Translation
from megatron_core.config.help import MOST_USED
from megatron_core.config.partition import layers_by_stage
from megatron_core.config.run import aliases, field_types, section_types, settings
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.features.megatron_flags import tables as megatron_flags

ROOT = Path(__file__).parents[2]


def parse(text: str) -> RunConfig:
    return parse_run_config(text.split())


def test_no_flags_give_the_defaults():
    assert parse("") == RunConfig()


def test_flags_are_flat_with_hyphens_or_underscores():
    config = parse("--tensor-model-parallel-size 2 --pipeline_model_parallel_size=4 --bf16 --no-progress")
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.pipeline_model_parallel_size == 4
    assert config.training.bf16 and not config.monitor.progress


def test_a_blend_is_a_list_up_to_the_next_flag():
    config = parse("--data-path 0.3 A 0.7 B --lr 1e-3 --min-lr -1")
    assert config.data.data_path == ("0.3", "A", "0.7", "B")
    assert config.optimizer.lr == 1e-3 and config.optimizer.min_lr == -1


def test_optional_settings_can_be_set_back_to_none(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("save_interval: 5\nsave: out\n")
    assert parse(f"--config {file} --save-interval None").checkpoint.save_interval is None


def test_command_line_needs_no_torch():
    imports = "import sys, megatron_core.config.cli, megatron_core.config.validate"
    code = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("flag", ["--help", "--unknown", "--hidden-size=33"])
def test_a_process_alone_answers_without_torch(flag: str) -> None:
    """Help and refused settings of the training command; its settings are complete except for ``flag``."""
    words = ["pretrain_gpt.py", "--mock-data", "--vocab-size=61", "--train-iters=1", flag]
    code = f"""
import sys
from megatron_core.commands.train import main
sys.argv = {words}
try:
    main()
except SystemExit as end:
    assert end.code == (0 if {flag!r} == "--help" else 1), end.code
else:
    raise AssertionError("it trains")
assert "torch" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert flag in ended.stderr + ended.stdout or "hidden_size=33" in ended.stderr


# ---- help and errors


def test_help_is_grouped_and_shows_one_spelling(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("--help all")
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for section in section_types():
        assert f"{section.replace('_', '-')} options" in text
    for name in field_types():
        assert "--" + name.replace("_", "-") in text or "--no-" + name.replace("_", "-") in text
    assert "--no-no-" not in text and "--no-bf16" not in text and "{None}" not in text


def help_about(topic, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_command_line(["--help", *topic.split()])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_first_screen_of_the_help_has_40_lines_and_the_most_used_flags(capsys):
    lines = help_about("", capsys).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    group = {name: name for name in MOST_USED} | {"": "files of settings"}
    for name, used in MOST_USED.items():
        start = next(at for at, line in enumerate(lines) if line.startswith(f"{group[name]}:"))
        flags = " ".join(itertools.takewhile(lambda line: line.startswith("  "), lines[start + 1 :])).split()
        assert flags == ["--" + each.replace("_", "-") for each in used]


def test_help_about_a_group_and_a_word(capsys):
    parallel = help_about("parallel", capsys)
    assert parallel.startswith("╭─ parallel options") and "--zero-stage" in parallel and "--hidden-size" not in parallel
    found = help_about("spike_factor", capsys)
    assert "--spike-factor FLOAT" in found and "--max-bad-steps INT" not in found
    assert found.count("╭") == 2  # --rerun-mode, of another group, refers to it
    assert "similar: tensor-model-parallel-size" in help_about("tensor-modl-parallel-size", capsys)


@pytest.mark.parametrize("columns", [80, 300])
def test_help_does_not_depend_on_a_wide_terminal(columns, capsys, monkeypatch):
    """tyro would print boxes side by side, and breaks lines where those of the source end."""
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_about("verify-checkpoint", capsys).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) == min(columns, 100)
    text = " ".join(" ".join(lines).replace("│", " ").split())
    assert "--no-verify-checkpoint Check the size and hash of every file" in text and "(on by default)" in text
    texts = [line[1:-2] for line in help_about("lora-target-modules", capsys).splitlines()[4:-1]]
    followed = itertools.pairwise(texts)
    assert all(len(f"{line.rstrip()} {after.split()[0]}") > len(line) for line, after in followed)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("topic", ["", "all"])
def test_help_into_a_closed_pipe_ends_silently(topic):
    command = [sys.executable, "pretrain_gpt.py", "--help", *topic.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as program:
        program.stdout.close()
        assert program.stderr.read() == b"" and program.wait() == 0


def test_unknown_flag_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-sise 2: neither .* perhaps you meant .*--tensor-model-par"
    ):
        parse("--tensor-parallel-sise 2")


def test_a_flag_without_its_value():
    with pytest.raises(ConfigError, match=r"--seq-length: a value is missing; legal: an integer"):
        parse("--seq-length --bf16")


def test_flags_of_other_programs_name_ours():
    """Each is unknown here and to Megatron-LM, and the flags that replace it exist."""
    with pytest.raises(ConfigError, match=r"--learning-rate 1e-4: .* in place of another program's flag, give --lr$"):
        parse_run_config(["--learning-rate", "1e-4"])
    own = {"--nproc-per-node", "--model-preset"} | {f"--{name.replace('_', '-')}" for name in field_types()}
    for name, ours in megatron_flags.OF_OTHER_PROGRAMS.items():
        assert name not in field_types() and name not in {**megatron_flags.FLAGS, **aliases()}
        assert {word.rstrip(";,") for word in ours.split() if word.startswith("--")} <= own, ours


def test_a_wrong_flag_hides_no_settings_of_a_folder():
    """The vocabulary of --load-hf is not missing because another flag is wrong."""
    with pytest.raises(ConfigError) as found:
        parse_command_line(["--load-hf", "folder", "--learning-rate", "1e-4"])
    assert "vocab_size" not in str(found.value) and "give --lr" in str(found.value)


def test_only_rank_0_prints_but_every_rank_fails(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    parse("--use-mcore-models")
    with pytest.raises(ConfigError):
        parse("--tensor-parallel-size 2 --use-mcore-models")
    text = capsys.readouterr()
    assert text.out + text.err == ""


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers two",
        "--num-layers",
        "--num-layers 2 3",
        "--normalization BatchNorm",
        "--bf16 true",
        "stray",
        "--window-size 1 2 3",
    ],
)
def test_bad_values_name_the_flag(flags):
    with pytest.raises(ConfigError, match=flags.split()[0]):
        parse(flags)


def test_whole_numbers_may_have_an_exponent():
    assert parse("--train-iters 5e5").training.train_iters == 500_000


def test_all_faults_come_in_one_message():
    """Errors for typos, values of the wrong type, unsupported values and faults found by validation."""
    flags = "--nun-layers 4 --lr high --fp4-format e2m1 --fp4-recipe nvfp4 --bf16 --fp16 --dry-run --world-size 3"
    with pytest.raises(ConfigError) as error:
        parse_command_line([*flags.split(), "--tensor-model-parallel-size", "2", "--vocab-size", "64"])
    message = str(error.value)
    assert message.startswith("5 settings cannot be used on 3 ranks:")
    for part in (
        "perhaps you meant --num-layers",
        "--lr high",
        "--fp4-format e2m1: 4-bit",
        "bf16=True and fp16=True",
    ):
        assert part in message
    assert "world_size=3" in message and "fp4-recipe" not in message


# ---- settings whose name begins with no_


def test_no_load_optim_is_a_plain_switch(tmp_path):
    assert parse("--no-load-optim").checkpoint.no_load_optim
    file = tmp_path / "run.yaml"
    file.write_text("no_load_optim: true\n")
    assert parse(f"--config {file}").checkpoint.no_load_optim
    assert not parse(f"--config {file} --load-optim").checkpoint.no_load_optim


# ---- Megatron-LM's other flags


def test_tables_name_no_setting_of_this_project_and_nothing_twice():
    tables = (megatron_flags.ACCEPTED, megatron_flags.DEPENDENT, megatron_flags.REFUSED)
    words = [word.rstrip("=") for table in tables for words in table.values() for word in words.split()]
    names = [*words, *megatron_flags.SAME_AS, *aliases()]
    assert len(names) == len(set(names))
    assert not set(names) & field_types().keys()
    assert set(aliases().values()) <= field_types().keys()
    assert megatron_flags.SAME_VALUE.keys() <= field_types().keys()
    assert megatron_flags.DEPENDENT.keys() <= {*words, *field_types()}
    assert megatron_flags.ONLY_VALUE.keys() <= {*words}


def test_every_reason_belongs_to_one_family():
    reasons = [reason for family in megatron_flags.FAMILIES.values() for reason in family.reasons]
    assert sorted(reasons) == sorted(megatron_flags.ACCEPTED)


def test_lists_of_balancing_losses():
    losses = "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3"
    model = parse(f"--num-experts 4 {losses}").model
    assert model.balancing_losses == {"seq_aux_loss": 1e-2, "global_aux_loss": 1e-3}
    assert parse("--num-experts 4 --moe-aux-loss-coeff 1e-2").model.balancing_losses == {"seq_aux_loss": 1e-2}


def test_layers_without_rotary_positions():
    model = parse("--num-layers 8 --position-embedding-type rope --no-rope-freq ([0]*3+[1])*2").model
    every = parse("--num-layers 8 --position-embedding-type rope --no-rope-freq 4").model
    for found in (model, every):
        assert [layer for layer in range(8) if not found.has_rotary(layer)] == [3, 7]
    assert parse("--moe-layer-recompute").model.recompute_modules == ("core_attn", "moe")


def _given(name: str) -> list[str]:
    flag = megatron_flags.FLAGS[name]
    return ["--" + name.replace("_", "-"), *(["7"] if flag.takes_values else [])]


def _reason(name: str) -> str:
    """The reason for which a flag is refused, with the file of ``_given``."""
    reason = megatron_flags.FLAGS[name].reason
    return reason.replace("--from-json FILE", "--from-json 7") if len(_given(name)) == 2 else reason


def test_every_other_flag_does_what_its_table_says():
    """Accepted flags set nothing and a note names them; others are errors with a reason, or name the flag they need."""
    for name, flag in megatron_flags.FLAGS.items():
        given = _given(name)
        found = Translation.of(given, field_types())
        assert not found.flags, name
        if flag.fate == "refused":
            assert found.faults == [f"{' '.join(given)}: {_reason(name)}"]
            assert re.search(r"remove|use|only|give|set|prepare|write|go to|describe|legal|take", flag.reason)
        elif name in megatron_flags.TOGETHER:
            needed = megatron_flags.TOGETHER[name].replace("_", "-")
            assert found.faults == [f"{given[0]}: this needs --{needed}"]
        else:
            assert not found.faults and given[0] in found.ignored, name


def test_flags_that_megatron_does_not_read_beside_others():
    pattern = ["--hybrid-override-pattern", "M*-"]
    for given, other in ((["--add-qkv-bias"], ["--multi-latent-attention"]), (["--hybrid-mlp-ratio", "0.5"], pattern)):
        alone, found = (Translation.of(flags, field_types()) for flags in (other, [*given, *other]))
        assert found.flags == alone.flags and given[0] in found.ignored and not found.faults


def test_all_accepted_flags_together_change_nothing(capsys):
    accepted = {name for name, flag in megatron_flags.FLAGS.items() if flag.fate != "refused"}
    given = [_given(name) for name in sorted(accepted - megatron_flags.TOGETHER.keys())]
    assert len(given) > 400
    assert parse_run_config(list(chain(*given))) == RunConfig()
    noted = capsys.readouterr().err
    assert all(flag in noted for flag, *_ in given)


def test_all_refused_flags_are_in_one_message():
    refused = [name for name, flag in megatron_flags.FLAGS.items() if flag.fate == "refused"]
    for part in (refused[::2], refused[1::2]):  # half of them fit into the longest message that is shown in full
        with pytest.raises(ConfigError) as error:
            parse_run_config(list(chain(*map(_given, part))))
        for name in part:
            assert f"{' '.join(_given(name))}: {_reason(name)}" in str(error.value)


def test_a_pattern_of_layers_gives_their_number(tmp_path):
    """As in Megatron-LM, and a pattern may begin with a hyphen; the specification of hybrid models needs it."""
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    found = parse(f"--hybrid-override-pattern -M*M --is-hybrid-model {spec}").model
    assert (found.hybrid_layer_pattern, found.num_layers) == ("-M*M", 4)
    (tmp_path / "run.yaml").write_text("hybrid_layer_pattern: M-M\n")
    assert parse(f"--config {tmp_path}/run.yaml").model.num_layers == 3
    assert parse(f"--config {tmp_path}/run.yaml --hybrid-layer-pattern M-").model.num_layers == 2
    gdp = parse(f"--hybrid-layer-pattern M* {spec.replace('hybrid_stack', 'gdp_stack')} --gdp-num-householder 2").model
    assert (gdp.mamba_mixer, gdp.gdp_num_householder, found.mamba_mixer) == ("gated_delta_product", 2, "mamba2")
    with pytest.raises(ConfigError, match="hybrid_stack_spec: this needs --hybrid-layer-pattern"):
        parse(spec)
    with pytest.raises(ConfigError, match="--is-hybrid-model: this needs --hybrid-layer-pattern"):
        parse("--is-hybrid-model")


def printed_notes(capsys: pytest.CaptureFixture[str]) -> str:
    """The notes on standard error, without their line breaks."""
    return " ".join(capsys.readouterr().err.split())


def test_specifications_of_layers(capsys):
    """The settings select Megatron Core's specifications; a program reads its own itself."""
    for spec in ("local", "megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec"):
        assert parse(f"--spec {spec}").model == ModelConfig()
        assert f"--spec {spec} (this is done in any case)" in printed_notes(capsys)
    with pytest.raises(ConfigError, match=r"--spec my_layers my_spec: layers of your own belong to a program: run"):
        parse("--spec my_layers my_spec")


def test_refinements_of_a_mode_that_is_off(tmp_path, capsys):
    """Flags that Megatron-LM ignores are left out, with a note; in a file they are refused, as are other settings."""
    assert len(refinements()) > 20 and all(settings()[name].needs for name in refinements())
    given = {
        "--apply-wd-to-qk-layernorm": "--qk-layernorm",
        "--recompute-num-layers 1": "--recompute-granularity full",
        "--no-fp8-wgrad": "--fp8-format hybrid",
        "--loss-scale 1024": "--fp16",
    }
    assert parse(" ".join(given)) == RunConfig()
    noted = printed_notes(capsys)
    for flag, mode in given.items():
        name = flag.split()[0].replace("--no-fp8", "--fp8")
        assert re.search(rf"{name}[^;]*\(no effect without {mode}", noted)
    assert parse("--loss-scale 1024 --fp16").optimizer.loss_scale == 1024
    (tmp_path / "run.yaml").write_text("loss_scale: 1024\n")
    for refused in (f"--config {tmp_path}/run.yaml", "--moe-router-topk 4", "--num-query-groups 2"):
        assert any("has no effect without" in problem for problem in problems(parse(refused), 1))


def test_refinements_wait_for_the_settings_of_a_folder(capsys):
    """The first reading of the flags does not have the model of --load-hf, the second one does."""
    flags = ["--load-hf", "model", "--moe-aux-loss-coeff", "0.5", "--qk-clip-alpha", "0.7"]
    assert parse(" ".join(flags)).model.moe_aux_loss_coeff == 0.5
    assert capsys.readouterr().err == ""
    experts = RunConfig(model=ModelConfig(num_experts=4))
    found = parse_run_config(flags, defaults=experts)
    assert found.model.moe_aux_loss_coeff == 0.5
    assert "--qk-clip-alpha (no effect without --qk-clip)" in printed_notes(capsys)


def test_cuda_graphs_change_only_speed(capsys):
    settings = parse("--cuda-graph-impl local --cuda-graph-scope attn moe_router moe_preprocess").flat()
    assert (settings["cuda_graph_impl"], settings["cuda_graph_modules"]) == ("local", ("attn",))
    assert "--cuda-graph-scope moe_router moe_preprocess (these parts run without it" in printed_notes(capsys)
    assert parse("--cuda-graph-impl full_iteration --fp8-format hybrid").value("cuda_graph_impl") == "none"
    assert "--cuda-graph-impl (no effect with --fp8-format)" in printed_notes(capsys)


def test_dense_layers_and_lengths_of_megatron_deepspeed():
    tokens = "--seq-length 10 --global-batch-size 4 --train-tokens 800"
    assert parse(f"{tokens} --train-iters 20").training.train_iters is None
    assert parse(f"{tokens} --train-iters 19").training.train_iters == 19
    dense = "--num-experts 1 --moe-expert-parallel-size 1 --moe-loss-coeff 0.01 --moe-min-capacity 4"
    assert parse(dense) == RunConfig()
    assert parse("--num-experts 1 --moe-router-topk 1").model.num_experts == 1


def test_alibi_of_forks():
    assert parse("--use-alibi-mask").model.position_embedding_type == "alibi"


def test_a_distillation_of_modelopt(tmp_path, capsys):
    """The file in Megatron-LM's documentation without its pairs, and every kind that is refused."""
    file = tmp_path / "distill.yaml"
    flags = f"--export-kd-teacher-load {tmp_path} --export-kd-cfg {file}"
    file.write_text("logit_layers: [output_layer, output_layer]\nskip_lm_loss: true\nkd_loss_scale: 10.0\n")
    assert (parse(flags).value("kd_weight"), parse(flags).value("kd_temperature")) == (1.0, 1.0)
    file.write_text("logit_kl_temperature: 2\n")
    assert parse(flags).value("kd_temperature") == 2.0 and "T^2 = 4 times" in capsys.readouterr().err
    assert parse(f"{flags} --kd-temperature 3").value("kd_temperature") == 3.0
    for text, said in {
        "intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.0]]": "only logits are compared; use []",
        "logit_layers: [head, head]": "only the outputs of output_layer",
        "logit_kl_topk: 5": "all logits are compared",
        "skip_lm_loss: false\nkd_loss_scale: 3": "use --kd-weight 0.75 --kd-temperature 1",
        "skip_lm_loss: maybe": "skip_lm_loss=maybe: it must be true",
        "kd_loss_scale: -1": "kd_loss_scale=-1 must be a number > 0",
        "logit_kl_temperature: .nan": "logit_kl_temperature=nan must be a number > 0",
        "kd_loss_scale: 1" + 400 * "0": "must be a number > 0 and < 1e+06",
        "logit_kl_temperature: 1.0e+200": "must be a number > 0 and < 1e+06",
        "logit_kl_topk: 0x" + 4200 * "f": "cannot be read",
        "kd_alpha: 1": "kd_alpha: ModelOpt has no such field",
        "- 1": "holds a list",
        "!!python/object/apply:os.getcwd []": "cannot be read",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(said)):
            parse(flags)
    file.unlink()
    with pytest.raises(ConfigError, match=r"--export-kd-cfg .*distill.yaml cannot be read: .*No such file"):
        parse(flags)


def test_a_pattern_of_layers_says_their_stages_and_the_kind_of_attention(tmp_path):
    found = parse("--hybrid-layer-pattern M-M-M|-+ --pipeline-model-parallel-size 2")
    assert (found.model.hybrid_layer_pattern, found.model.multi_latent_attention) == ("M-M-M-*", True)
    assert found.parallel.pipeline_model_parallel_layout == "Et*5|ttL"
    assert layers_by_stage(found, 64, 2) == [range(5), range(5, 7)]
    implied, given = (parse(f"--hybrid-layer-pattern M+ {more}") for more in ("", "--multi-latent-attention"))
    assert implied == given, "with the same defaults of latent attention"
    sparse = "--multi-latent-attention --experimental-attention-variant dsa --cp-comm-type all_gather"
    implied, given = (
        parse(f"--hybrid-layer-pattern {flags} --qk-pos-emb-head-dim 32") for flags in ("MD", f"M* {sparse}")
    )
    assert implied.model == given.model and implied.model.has_sparse_attention
    for mixed in ("MD+", "MD*"):
        (problem,) = (each for each in problems(parse(f"--hybrid-layer-pattern {mixed}"), 1) if "one kind" in each)
        assert "write * for all, alone, with --multi-latent-attention, or also with" in problem
    with pytest.raises(ConfigError, match=r"also assigns layers to stages; remove it or the \|"):
        parse("--hybrid-layer-pattern M|- --pipeline-model-parallel-layout Et|tL")
    (tmp_path / "run.yaml").write_text("hybrid_layer_pattern: M||-\n")
    assert parse(f"--config {tmp_path}/run.yaml").parallel.pipeline_model_parallel_layout == "Et||tL"
    for file, flag in (("M||-", "M-*"), ("M+|-", "M*-"), ("M||-", "M||*-")):
        (tmp_path / "run.yaml").write_text(f"hybrid_layer_pattern: {file}\n")
        replaced = parse(f"--config {tmp_path}/run.yaml --hybrid-layer-pattern {flag}")
        assert replaced == parse(f"--hybrid-layer-pattern {flag}"), "nothing of the file's pattern remains"
    (tmp_path / "run.yaml").write_text("hybrid_layer_pattern: M|-\npipeline_model_parallel_layout: EttL\n")
    with pytest.raises(ConfigError, match=r"means pipeline_model_parallel_layout=Et\|tL, but .*=EttL; remove one"):
        parse(f"--config {tmp_path}/run.yaml")
    config = parse("--hybrid-layer-pattern M|-|* --pipeline-model-parallel-size 2")
    assert any("has 3 stages, which pipeline_model_parallel_size=2 cannot share" in p for p in problems(config, 2))


def test_a_flag_that_belongs_to_a_refused_one_is_not_reported_itself():
    with pytest.raises(ConfigError) as error:
        parse("--fp4-format e2m1 --fp4-recipe nvfp4")
    assert "--fp4-recipe" not in str(error.value)
    assert parse("--fp4-recipe nvfp4") == parse("--cuda-graph-impl none") == RunConfig()


@pytest.mark.parametrize(
    "name", sorted({*megatron_flags.SAME_AS, *megatron_flags.OVERRIDDEN_BY_FLAG} - aliases().keys())
)
def test_every_alias_parses(name):
    mode = " --fp8-format e4m3" * (name == "disable_fp8_wgrad") + " --load runs" * (
        name in megatron_flags.UNREAD_WITHOUT
    )
    assert parse(f"--{name.replace('_', '-')}{mode}") != parse(mode)


def test_aliases_mean_the_same():
    assert parse("--use-rotary-position-embeddings").model.position_embedding_type == "rope"
    assert parse("--recompute-activations").model.recompute_granularity == "selective"
    assert parse("--attention-backend flash").model.attention_backend == "auto"
    assert parse("--eval-iters -1").training.eval_iters == 0
    assert parse("--attention-backend=local").model.attention_backend == "unfused"
    assert parse("--check-weight-hash-across-dp-replicas-interval 7").value("replica_check_interval") == 7
    assert parse("--cross-entropy-fusion-impl te") == RunConfig()
    assert parse("--use-megatron-fsdp").parallel.dp_zero_stage == parse("--use-torch-fsdp2").parallel.dp_zero_stage == 3
    assert parse("--data-parallel-sharding-strategy optim --use-megatron-fsdp").parallel.dp_zero_stage == 1
    pieces = parse("--tokenizer-type GPTSentencePieceTokenizer").data.tokenizer_type
    assert pieces == "SentencePieceTokenizer"


def test_names_of_megatrons_branch_dev_mean_the_same():
    streams = parse("--enable-hyper-connections --num-residual-streams 2 --mhc-init-gating-factor 0.5")
    assert streams == parse("--enable-mhc-connections --mhc-num-residual-streams 2 --mhc-init-gating-factor 0.5")
    nets = parse("--experimental-attention-variant gated_delta_net --linear-attention-freq 2")
    for name in ("--experimental-attention-variant gdn", "--linear-attention-type gated_delta_net"):
        assert parse(f"{name} --linear-attention-freq 2") == nets
    assert parse("--fallback-to-eager-attn").model.attention_backend == "unfused"
    assert parse("--fallback-to-eager-attn --attention-backend flash").model.attention_backend == "auto"


def test_yarn_is_selected_as_in_megatron():
    model = parse("--position-embedding-type yarn --yarn-original-max-position-embeddings 64").model
    assert (model.position_embedding_type, model.rope_scaling_type, model.rope_scaling_factor) == ("rope", "yarn", 1.0)
    assert model.use_rope_scaling and model.original_max_position_embeddings == 64
    again = parse("--rotary-scaling-factor 40 --rope-type yarn --no-yarn-correction-range-round-to-int").model
    assert again.use_rope_scaling and again.rope_scaling_factor == 40.0 and not again.yarn_correction_range_round_to_int


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "--enable-gpt-oss --rotary-base 150000 --load checkpoints",
            {
                "position_embedding_type": "rope",
                "use_rope_scaling": True,
                "rope_scaling_type": "yarn",
                "rope_scaling_factor": 32.0,
                "original_max_position_embeddings": 131072,
                "yarn_correction_range_round_to_int": False,
                "rotary_base": 150000.0,
                "load": "checkpoints",
            },
        ),
        (
            "--qk-layernorm --no-weight-decay-cond-type apply_wd_to_qk_layernorm",
            {"qk_layernorm": True, "apply_wd_to_qk_layernorm": True},
        ),
        ("--enable-gpt-oss --export-qk-l2-norm", {}),
        ("--optimizer dist_muon", {"optimizer": "muon", "use_distributed_optimizer": True}),
        (
            "--optimizer muon --muon-no-split-qkv --muon-use-nesterov --muon-tp-mode distributed",
            {"optimizer": "muon", "muon_split_qkv": False, "muon_nesterov": True},
        ),
        ("--exit-signal SIGUSR1 --exit-signal-handler", {}),
        ("--bias-gelu-fusion", {"openai_gelu": True}),
    ],
)
def test_a_flag_with_an_effect_in_megatron_has_it_here(text, expected):
    assert parse(text) == RunConfig.from_flat(expected)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("--exit-signal SIGUSR2", "SIGUSR2 writes a memory snapshot"),
        ("--exit-signal SIGQUIT", "use one of the first four"),
        ("--no-weight-decay-cond-type other", "legal: apply_wd_to_qk_layernorm"),
        ("--kill-switch-path stop", "send SIGTERM or SIGUSR1"),
        ("--modelopt-enabled", "other kinds of distillation are not supported; see --kd-teacher"),
        ("--muon-tp-mode blockwise", "use duplicated or distributed"),
        ("--megatron-fsdp-main-params-dtype auto", "main weights are float32"),
    ],
)
def test_a_flag_that_would_change_the_run_is_refused(text, way_out):
    with pytest.raises(ConfigError, match=re.escape(way_out)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "window", "skip"),
    [
        ("--window-size 127 0", (127, 0), None),
        ("--window-size 127,0 --window-attn-skip-freq 4", (127, 0), (4,)),
        ("--window-size=(127,0) --window-attn-skip-freq ([1]*3+[0])*2", (127, 0), (1, 1, 1, 0) * 2),
        ("--window-size -1,0 --window-attn-skip-freq 1 0", (-1, 0), (1, 0)),
    ],
)
def test_windows_may_be_written_as_megatron_does(text, window, skip):
    model = parse(text).model
    assert (model.window_size, model.window_attn_skip_freq) == (window, skip)


@pytest.mark.parametrize("text", ["[1]*99999999", "[1]*9999*9999*9999", "open", "[1", "1+[1]", "2**9"])
def test_a_list_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ConfigError, match=r"--window-attn-skip-freq .*: this cannot be read"):
        parse(f"--window-size 4 0 --window-attn-skip-freq {text}")


def test_the_output_layer_is_fused_with_the_loss_where_both_flags_say_so():
    fused, linear = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl linear"
    assert parse(f"{fused} {linear}").model.fuses_output_layer_with_loss
    for flags in ("", fused, linear, f"{fused} --cross-entropy-fusion-impl native"):
        assert not parse(flags).model.fuses_output_layer_with_loss


@pytest.mark.parametrize(
    "flags",
    [
        "--no-position-embedding --use-rotary-position-embeddings",
        "--position-embedding-type rope --no-position-embedding",
    ],
)
def test_no_position_embedding_changes_nothing_beside_rotary_ones(flags):
    assert parse(flags).model.position_embedding_type == "rope"
    assert parse("--no-position-embedding").model.position_embedding_type == "none"


def test_flags_without_effect_go_with_one_note(capsys):
    flags = "--use-mcore-models --transformer-impl local --vocab-extra-ids 0 --no-bias-gelu-fusion --no-rope-fusion"
    assert parse(flags + " --num-layers 3") == parse("--num-layers 3")
    note = printed_notes(capsys)
    assert note.count("note:") == 1
    for flag in ("--use-mcore-models", "--transformer-impl", "--vocab-extra-ids 0", "--no-bias-gelu-fusion"):
        assert flag in note


def test_a_switch_without_effect_swallows_no_value():
    with pytest.raises(ConfigError, match="--use-mcore-models 3: this is a switch"):
        parse("--use-mcore-models 3")


def test_quotes_that_the_shell_has_kept_are_taken_off():
    assert parse("--split '99,1,0'").data.split == "99,1,0"


def test_the_default_tokenizer_is_that_of_its_two_files():
    assert parse("--vocab-file v --merge-file m").data.tokenizer == "GPT2BPETokenizer"
    assert parse("--vocab-file v --merge-file m --tokenizer-type NullTokenizer").data.tokenizer == "NullTokenizer"
    assert parse("--vocab-file v").data.tokenizer is None


def test_the_old_name_of_recomputation():
    model = parse("--activations-checkpoint-method block").model
    assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == ("full", "block", 1)
    model = parse("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2").model
    assert (model.recompute_method, model.recompute_num_layers) == ("uniform", 2)


@pytest.mark.parametrize("flags", ["--checkpoint-activations {}", "{} --checkpoint-activations"])
def test_the_oldest_name_of_recomputation(flags):
    """One layer between two checkpoints, unless the other flag changes it; the order of the flags does not matter."""
    for number, given in ((1, ""), (3, "--checkpoint-num-layers 3")):
        model = parse(flags.format(given)).model
        assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == (
            "full",
            "uniform",
            number,
        )


def test_flags_of_earlier_releases():
    theirs = "--layernorm-epsilon 1e-6 --min-scale 2 --override-lr-scheduler --fp8-hybrid --use-custom-fsdp"
    ours = "--norm-epsilon 1e-6 --min-loss-scale 2 --override-opt-param-scheduler --fp8-format hybrid"
    assert parse(theirs) == parse(ours + " --data-parallel-sharding-strategy optim_grads_params")
    with pytest.raises(ConfigError, match="--train-samples") as error:
        parse("--train-tokens 300000000000 --retro-add-retriever --retro-num-neighbors 2")
    assert "2 settings" in str(error.value)


def test_a_path_with_spaces_needs_quotes():
    with pytest.raises(ConfigError, match="one value"):
        parse("--load my checkpoints")
    assert parse_run_config(["--load", "my checkpoints"]).checkpoint.load == "my checkpoints"


def test_a_choice_of_numbers() -> None:
    """A flag's value is text, while its choices are integers."""
    assert parse_run_config(["--zero-stage", "3"]).parallel.dp_zero_stage == 3
    kinds = parse_run_config(["--cp-comm-type", "p2p", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "4"])
    assert kinds.parallel.cp_comm_type == ("p2p", "a2a+p2p")
    assert kinds.parallel.hierarchical_context_parallel_sizes == (2, 4)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path F --normalization rmsnorm "
            "--num-key-value-heads 2",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model F --normalization RMSNorm --group-query-attention "
            "--num-query-groups 2",
        ),
        (
            "--use-rotary-position-embeddings --position-embedding-type rotary --intermediate-size 96 --data-impl mmap "
            "--use-llama2-rotary-position-embeddings",
            "--position-embedding-type rope --ffn-hidden-size 96",
        ),
        (
            "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --beta-slow 2 "
            "--moe-token-dispatcher-type alltoall_seq --beta-fast 16 --rope-scaling-mscale 0.7 "
            "--rope-scaling-original-max-position-embeddings 512",
            "--context-parallel-size 2 --cp-comm-type a2a --moe-token-dispatcher-type alltoall --yarn-beta-fast 16 "
            "--yarn-beta-slow 2 --mscale 0.7 --original-max-position-embeddings 512",
        ),
        (
            "--num-experts 4 --moe-loss-coeff 0.02 --topk 2 --moe-expert-parallel-size 2 "
            "--moe-train-capacity-factor 1.5 --optimizer fusedadamw --universal-checkpoint --mlp-type standard",
            "--num-experts 4 --moe-aux-loss-coeff 0.02 --moe-router-topk 2 --expert-model-parallel-size 2 "
            "--moe-expert-capacity-factor 1.5 --optimizer adam",
        ),
        (
            "--moe-num-experts 4 --moe-loss-weight 0.02 --moe-top-k 2 --moe-capacity-factor 1.5",
            "--num-experts 4 --moe-aux-loss-coeff 0.02 --moe-router-topk 2 --moe-expert-capacity-factor 1.5",
        ),
        ("--dsa-indexer-topk-freq 1 --dsa-indexer-skip-topk-offset 0", ""),
        (
            "--seq-length 2048 --train-samples 200 --train-tokens 204800 --lr-decay-samples 5 --lr-decay-tokens 81920 "
            "--lr-warmup-tokens 8192 --position-embedding-type alibi --embed-layernorm",
            "--seq-length 2048 --train-samples 100 --lr-decay-samples 40 --lr-warmup-samples 4 "
            "--position-embedding-type alibi --embedding-layernorm",
        ),
        ("--train-samples 90 --train-tokens 204800 --seq-length 2048", "--train-samples 90 --seq-length 2048"),
        ("--use-fused-swiglu --no-shared-storage --swap-attention --ds-sequence-parallel-size 1", ""),
    ],
)
def test_flags_of_forks(theirs, ours):
    """Megatron-DeepSpeed, Pai-Megatron-Patch, MindSpeed-LLM and MegaBlocks."""
    assert parse(theirs) == parse(ours)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--deepspeed ds.json", "megatron-deepspeed-config --from-json ds.json --output settings.yaml"),
        ("--deepspeed_config my.json", "megatron-deepspeed-config --from-json my.json --output"),
        ("--deepspeed", "megatron-deepspeed-config --from-json FILE"),
        ("--bf16 true", "--bf16 true: this is a switch; remove the value"),
        ("--bf16 False", "--bf16 False: this is a switch; to turn it off, give --no-bf16"),
        ("--no-load-optim 0", "--no-load-optim 0: this is a switch; to turn it off, give --no-load-optim"),
    ],
)
def test_values_of_switches(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    assert message in str(caught.value)


def test_the_complete_help_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """As the message about an unknown name says."""
    with pytest.raises(ConfigError, match="--help all lists every setting"):
        parse("--zqxj")
    with pytest.raises(SystemExit):
        parse("--help all")
    words = {word.rstrip(",") for word in capsys.readouterr().out.split()}
    names = [name.replace("_", "-") for name in RunConfig().flat()]
    assert [name for name in names if not {f"--{name}", f"--no-{name}"} & words] == []
