"""The command that reads launch scripts of Megatron-LM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_core.commands.from_megatron import main
from megatron_core.config.cli import parse_run_config
from megatron_core.config.file import read_config
from megatron_core.planner.parameters import model_parameters
from megatron_core.reports.dry_run import RankEstimate

ROPE = ("--position-embedding-type", "rope")
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
GPUS_PER_NODE=8
TP=${TP:-2}
DATA_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${SLURM_NNODES}
    --node_rank $SLURM_NODEID
)
MODEL_ARGS="
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings --no-position-embedding
"
if [ "$FP8" = true ]; then MODEL_ARGS="$MODEL_ARGS --fp8-hybrid"; fi
TRAINING_ARGS=(--micro-batch-size 2 --global-batch-size $((2 * 16)) --train-iters 1000 --lr 6.0e-5 --bf16)
TRAINING_ARGS+=(--use-mcore-models)
srun torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py $MODEL_ARGS ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --use-distributed-optimizer \\
    --data-path $DATA_PATH --vocab-size 1000 --tokenizer-type NullTokenizer 2>&1 | tee log.txt
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_launch_that_starts_unchanged(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "run.yaml"
    assert main(["--output", str(written), str(script), "/data/text"]) == 0
    text = capsys.readouterr().out
    flags = (
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
        "--attention-dropout 0 --hidden-dropout 0 --swiglu --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 32 --train-iters 1000 --lr 6e-5 "
        "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
        "--data-path /data/text --vocab-size 1000 --tokenizer-type NullTokenizer "
        "--lr-one-step-later --data-order megatron"
    )
    expected = parse_run_config(flags.split())
    assert read_config(written) == expected
    for part in (
        "pretrain_gpt.py on 16 ranks (its launcher)",
        "starts unchanged",
        "layout: tp2 pp2 dp4 zero1 mbs2",
        "32 sequences (8,192 tokens) a step",
        "translated: --use-rotary-position-embeddings -> --position-embedding-type rope",
        "without effect: --use-mcore-models: there is one implementation of the model",
        "--eval-iters 100; here 10",
        "fits into",
        f"megatron-verify --config {written} --world-size 8",
        "two of its 4 copies are compared",
        f"torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        f"-m megatron_core.commands.train --config {written}",
    ):
        assert part in " ".join(text.split()), part
    assert "What to change first" not in text


DEEPSPEED = """
MICRO=4; STAGE=1; config_json=ds.$SLURM_JOBID.json
cat <<EOT > $config_json
{"train_micro_batch_size_per_gpu": $MICRO, "train_batch_size": 32, "optimizer": {"type": "Adam"},
 "gradient_clipping": CLIP, "zero_optimization": {"stage": $STAGE}, "bf16": {"enabled": ENABLED}}
EOT
sed "s/ENABLED/true/" $config_json | sed 's#CLIP#2.5#' > tuned.json
deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
    --max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 64 --train-iters 10 --lr 1e-3 \\
    --mock-data --vocab-size 99 --deepspeed --deepspeed_config FILE --zero-stage 0 --optimizer sgd
"""


@pytest.mark.parametrize("source", ["written", "near", "line"])
def test_the_file_of_deepspeed(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script writes the file, or it is near the script or the command line; the settings are those of its JSON."""
    monkeypatch.chdir(tmp_path)
    text = DEEPSPEED.replace("FILE", "tuned.json" if source == "written" else "near.json")
    near = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 32, "gradient_clipping": 2.5}
    near |= {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    (tmp_path / "near.json").write_text(json.dumps(near))
    (tmp_path / "train.sh").write_text(text)
    words = (
        ["train.sh"] if source != "line" else ["--", *text[text.index("deepspeed --num") :].replace("\\\n", "").split()]
    )
    assert main(["--output", "run.yaml", *words]) == 1
    out = capsys.readouterr().out
    assert "starts with the YAML below, which has the settings of the DeepSpeed file" in out
    assert ("optimizer: the flags select it" in " ".join(out.split())) == (source == "written")
    config = read_config(tmp_path / "run.yaml")
    assert (config.training.micro_batch_size, config.training.global_batch_size, config.training.bf16) == (4, 64, True)
    assert (config.parallel.zero_stage, config.optimizer.clip_grad) == (1, 2.5)
    assert (config.optimizer.optimizer, config.optimizer.lr) == ("sgd", 1e-3)


def test_a_file_of_deepspeed_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.sh"
    for old, new, said in (
        ("MICRO=4; ", "", "values of MICRO are not known; give --set MICRO=VALUE"),
        ("ENABLED/true", "ENABLED/maybe", "not valid JSON"),
        ('"train_batch_size"', '"train_batch"', "train_batch"),
        ("MICRO=4", "MICRO=2", "train_micro_batch_size_per_gpu=2 differs from --micro-batch-size 4"),
        ('"gradient_clipping"', '"scheduler": {"type": "WarmupLR"}, "gradient_clipping"', "scheduler: DeepSpeed until"),
        ("\ndeepspeed", "\nsed -i s/2.*/3/ tuned.json\ndeepspeed", "values of output-of-sed are not known"),
        ("s/ENABLED/true/", "s/E.*D/true/", "values of output-of-sed are not known"),
        ("> tuned.json", "> other.json", "translate its file by megatron-deepspeed-config"),
    ):
        path.write_text(DEEPSPEED.replace("FILE", "tuned.json").replace(old, new))
        assert main([str(path)]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert said in out and "does not start unchanged" in out


def test_each_launch_has_its_file_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script may write the same file for several launches, and edit it in place."""
    launch = DEEPSPEED[DEEPSPEED.index("deepspeed --num") :].replace("FILE", "./tuned.json")
    start = DEEPSPEED[: DEEPSPEED.index("deepspeed --num")]
    edit = "cp tuned.json new.json; sed -i 's/true/false/' new.json; cp new.json tuned.json\n"
    path = tmp_path / "train.sh"
    path.write_text(f"{start}{launch}{edit}{launch}")
    for number, is_16_bit in ((1, True), (2, False)):
        assert main(["--launch", str(number), "--output", str(tmp_path / f"{number}.yaml"), str(path)]) == 1
        assert read_config(tmp_path / f"{number}.yaml").training.bf16 is is_16_bit
    capsys.readouterr()


def test_settings_that_a_launch_gives_differ_in_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    """The router's precision, and the balancing loss of sequences, are Megatron-LM's if the launch names them."""
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --mock-data --vocab-size 128 --train-iters 9 --bf16"
    )
    launch = ["--", "python", "pretrain_gpt.py", *flags.split(), "--num-experts", "4", "--moe-aux-loss-coeff", "0.1"]
    launch += ["--use-checkpoint-opt_param-scheduler"]
    given = ["--moe-router-dtype", "fp32", "--moe-router-load-balancing-type", "seq_aux_loss"]
    for more, told in ((given, False), ([], True)):
        assert main([*launch, *more]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("differs from Megatron-LM: router" in text) == told and "balancing loss: of" not in text
        assert "translated:" not in text, "an underscore in a flag changes nothing"


def test_a_checkpoint_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its script saves to the folder it loads; resuming here needs another folder, and the delayed learning rate."""
    root, load = tmp_path / "checkpoints", "on this machine"
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --mock-data --vocab-size 64 --train-iters 90000"
    launch = ["--", "python", "pretrain_gpt.py", *flags.split(), "--lr-decay-style", "cosine", "--load", str(root)]
    assert main([*launch, "--save", str(root)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{load}: to resume a checkpoint of Megatron-LM in it, give another folder with --save" in text
    assert "differs from Megatron-LM: dropout masks" in text and "differs from Megatron-LM: learning rate" not in text
    assert " parameters, sequences" in text and "billion" not in text and text.count(" hours ") == 1
    root.mkdir()
    assert main([*launch, "--save", str(root)]) == 0 and load not in " ".join(capsys.readouterr().out.split())
    (root / "iter_0000010").mkdir()
    (root / "iter_0000010" / ".metadata").touch()
    assert main([*launch, "--save", str(root)]) == 1
    assert "has neither latest_checkpointed_iteration.txt" in " ".join(capsys.readouterr().out.split())
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    assert main([*launch, "--save", str(root)]) == 1
    changes = " ".join(capsys.readouterr().out.partition("What to change first")[2].split())
    assert "give another folder with --save" in changes and "learning" not in changes
    launch += ["--save", str(root / "other")]
    assert main([*launch, "--no-as-megatron"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "add --as-megatron, or --finetune" in text and "differs from Megatron-LM: learning rate" in text
    assert main(launch) == 0
    assert main([*launch, "--no-as-megatron", "--lr-decay-style", "constant"]) == 0


def test_a_report_needs_no_torch(script: Path) -> None:
    """Importing torch takes three times as long as the whole report."""
    code = "import sys; from megatron_core.commands.from_megatron import main; status = main(sys.argv[1:])"
    code += "; assert 'torch' not in sys.modules; sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code, script, "/data"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "megatron-verify --config run.yaml" in done.stdout, done.stderr


def test_the_proposed_proof_runs(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_core.commands.verify_layout import main as verify

    written = tmp_path / "run.yaml"
    assert main(["--output", str(written), "--set", "TP=1", "--world-size", "2", str(script), "/data/text"]) == 0
    text = capsys.readouterr().out
    command = next(line for line in text.splitlines() if line.strip().startswith("megatron-verify")).split()
    assert verify([*command[1:], "--steps", "1"]) == 0
    assert "pp2" in capsys.readouterr().out


def test_variables_and_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "TP=4", "--set", "FP8=true", str(script)]) == 0
    text = capsys.readouterr().out
    assert "tp4 pp2" in text and "fp8 hybrid" in text and "data: <argument-1>" in text
    assert "not set in the script:" in text and "SLURM_NODEID" in text
    section = text[text.index("The same settings as YAML") :].split("\n\n")[0].split("\n", 1)[1]
    settings = yaml.safe_load(section)
    assert settings["parallel"]["tensor_model_parallel_size"] == 4
    assert settings["data"]["data_path"] == ["<argument-1>"]


def test_what_cannot_start(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers $N --fp4-format e2m1 --num-attention-heads 12 --hidden-size 100 --mock-data --vocab-size 64"
    assert main(["--", "torchrun", "--nproc-per-node=2", "pretrain_gpt.py", *flags.split()]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "pretrain_gpt.py on 2 ranks" in text and "does not start unchanged" in text
    changes = text[text.index("What to change first") :]
    for part in (
        "--fp4-format e2m1: 4-bit training is not supported",
        "--num-layers $N: this cannot be read",
        "hidden_size=100",
    ):
        assert part in changes


def test_an_unknown_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sh"
    path.write_text(
        "python3 train.py --num-layers $LAYERS --hidden-size 64 --mock-data --vocab-size 64 --train-iters 2"
    )
    assert main([str(path)]) == 1
    assert "--num-layers <LAYERS>: its value is not known; give --set LAYERS=VALUE" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_optimizer_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sh"
    path.write_text("python3 train.py --optimizer $OPTIMIZER --mock-data --vocab-size 64 --train-iters 2")
    assert main([str(path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "optimizer=<OPTIMIZER> is unknown; legal: adam," in text


def test_several_launches_and_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sh"
    common = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2"
    path.write_text(
        f"python tools/preprocess_data.py --input x\npython pretrain_gpt.py {common}\n"
        f"mpirun -np 4 python pretrain_bert.py {common}\n"
    )
    assert main([str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "launches in the script: 1: pretrain_gpt.py" in text and "2: pretrain_bert.py" in text
    assert "there is nothing to compare" in text
    assert main(["--launch", "2", str(path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "pretrain_bert.py on 4 ranks" in text and "another kind of model" in text


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("tools/preprocess_data.py", "use megatron-preprocess"),
        ("tools/checkpoint/convert.py", "use megatron-convert"),
        ("examples/detxoify_lm/generate_samples_gpt.py", "use megatron-serve or megatron-generate"),
        ("examples/post_training/modelopt/quantize.py", "which is not supported"),
        ("train_rl.py", "reinforcement learning"),
        ("/home/albert/vision/Megatron-LM/pretrain_gpt.py", ""),  # the folder does not tell the program
    ],
)
def test_programs_that_do_not_train_a_gpt(program: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their own flags are not reported as unknown ones."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2"
    assert main(["--", "python", program, *flags.split(), *(["--loader", "x"] if said else [])]) == bool(said)
    changes = " ".join(capsys.readouterr().out.split()).partition("What to change first")[2]
    assert said in changes.partition("The same settings")[0] and "--loader" not in changes.partition("The same")[0]


def test_every_directive_of_slurm_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH --account=a\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node 2 # of them\n"
        "#SBATCH --gpus-per-node=2\t# Hopper\n#SBATCH --exclusive # comment\n#SBATCH -t 1:00:00\n"
        "srun python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data "
        "--vocab-size 64 --train-iters 2 --tensor-model-parallel-size $SLURM_GPUS_PER_NODE\n"
    )
    assert main([str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "pretrain_gpt.py on 8 ranks (its launcher)" in text and "layout: tp2" in text


@pytest.mark.parametrize("tasks", ["--ntasks-per-node=1", "--ntasks=2"])
def test_a_rank_for_each_gpu_that_torchrun_finds(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm's tasks start torchrun, which starts a rank for each of the GPUs of a node."""
    path = tmp_path / "a.sh"
    path.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH {tasks}\n#SBATCH --gpus-per-node=4\n"
        "srun torchrun --nnodes=2 --nproc_per_node=gpu pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2\n"
    )
    assert main([str(path)]) == 0
    assert "pretrain_gpt.py on 8 ranks (its launcher)" in " ".join(capsys.readouterr().out.split())


def test_a_line_without_a_backslash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For bash the flags on the next line are another command, which starts nothing."""
    path = tmp_path / "a.sh"
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2"
    path.write_text(f"python pretrain_gpt.py {flags}\n  --bf16 --swiglu --lr 1e-3 --micro-batch-size 2\n")
    assert main([str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a.sh line 2 begins with --bf16: the line before lacks a \\" in text and "launches in" not in text


def test_a_launch_on_too_few_ranks_names_the_number(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of Mixtral's layout, with one node of 8 ranks: a copy of the experts has 32."""
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2 "
        "--num-experts 8 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --global-batch-size 64"
    )
    launch = ["--", "torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *flags.split()]
    assert main(launch) == 1
    changes = " ".join(capsys.readouterr().out.split()).partition("What to change first")[2].partition("The same")[0]
    assert (
        "world_size=8 is not a multiple of 32 (expert_model_parallel_size=8 x pipeline_model_parallel_size=4); "
        "start 32 ranks or a multiple" in changes
    )
    assert "rank_order" not in changes
    assert main(["--world-size", "32", *launch]) == 0


def test_flags_that_no_value_makes_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused also if their value is not known, rather than asked for."""
    path = tmp_path / "a.sh"
    path.write_text(
        "python3 pretrain_gpt.py --num-layers 2 --hidden-size $H --nothing /logs/$NODES --deepspeed_config $FILE "
        "--mock-data --vocab-size 64 --train-iters 2"
    )
    assert main([str(path)]) == 1
    changes = " ".join(capsys.readouterr().out.split()).partition("What to change first")[2].partition("The same")[0]
    assert "--hidden-size <H>: its value is not known; give --set H=VALUE" in changes
    assert "--nothing /logs/<NODES>: neither a flag" in changes and "--set NODES" not in changes
    assert "--deepspeed_config <FILE>: DeepSpeed is not used" in changes and "--set FILE" not in changes


def test_dtypes_of_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2 --bf16 "
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16"
    )
    assert main(["--", "python", "pretrain_gpt.py", *flags.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "without effect: --main-grads-dtype bf16: main gradients are float32" in text
    assert "translated: --megatron-fsdp-grad-comm-dtype bf16 -> --grad-reduce-in-bf16" in text


@pytest.mark.parametrize("program", ["pretrain_mamba.py", "pretrain_hybrid.py"])
def test_a_hybrid_model_needs_its_pattern(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it the model would be a GPT."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2"
    launch = ["--", "python", program, *flags.split()]
    assert main(launch) == 1
    changes = " ".join(capsys.readouterr().out.split()).partition("What to change first")[2]
    assert "give --hybrid-layer-pattern; M for each layer if the model has only Mamba layers" in changes
    assert main([*launch, "--is-hybrid-model", "--hybrid-override-pattern", "M*", "--mamba-head-dim", "16"]) == 0
    assert "starts unchanged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a launch script"),
        (["absent.sh"], "this script does not exist"),
        (["--", "echo", "x"], "no start of a training program"),
        (["--set", "X", "--", "--num-layers", "2"], "--set X: give NAME=VALUE"),
        (["--launch", "2", "--", "--num-layers", "2"], "--launch 2: the number of launches in the script is 1"),
        (["--world-size", "0", "--", "--num-layers", "2"], "--world-size 0 must be an integer >= 1"),
        (["--hardware", "z9", "--", "--num-layers", "2", "--train-iters", "1"], "z9"),
    ],
)
def test_what_cannot_be_read(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert said in errors and len(errors.splitlines()) == 1


def test_parameters_are_those_of_the_model() -> None:
    flags = "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --num-experts 4 --swiglu --disable-bias-linear"
    config = parse_run_config([*flags.split(), "--vocab-size", "128", "--mtp-num-layers", "1", *ROPE])
    assert model_parameters(config, 128) == RankEstimate.of(config, 1).model_parameters


@pytest.mark.parametrize(
    "lines",
    [
        "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=h100:4\nsrun COMMAND",
        "srun --nodes 2 --ntasks-per-node=4 bash -c 'COMMAND'",
        "nice -n 3 srun --ntasks=8 nice -n 10 COMMAND",
        "#SBATCH --nodes=3\nsbatch --nodes=2 job.slurm",
    ],
)
def test_ranks_of_slurm(lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Types of GPUs, shells that srun starts, other programs with a flag -n, and submitted scripts."""
    command = "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data"
    command += " --vocab-size 64 --train-iters 2"
    path = tmp_path / "a.sh"
    path.write_text(lines.replace("COMMAND", command))
    job = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\nsrun COMMAND --seed $SLURM_NTASKS"
    (tmp_path / "job.slurm").write_text(job.replace("COMMAND", command))
    assert main([str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "pretrain_gpt.py on 8 ranks (its launcher)" in text
