#!/usr/bin/env bash
# A Slurm job: srun starts one rank per GPU, and the ranks meet on the first node.
#   sbatch --nodes 16 examples/slurm.sh --config examples/mixtral_8x22b.yaml --data-path corpus_text_document \
#     --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --save checkpoints --save-interval 500
# IMAGE=./megatron-native.sqsh runs the ranks in a container, with Slurm's plugin pyxis.
#SBATCH --job-name=pretrain
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
set -euo pipefail

LOAD=()  # a requeued job resumes from its last checkpoint
for ((i = 1; i < $#; i++)); do
  if [[ ${!i} == --save ]]; then next=$((i + 1)) && LOAD=(--load "${!next}"); fi
done

CONTAINER=()
if [[ -n "${IMAGE:-}" ]]; then
  CONTAINER=(--container-image="$IMAGE" --container-mounts="$PWD" --container-workdir="$PWD")
fi
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # since Slurm 22.05 srun does not take this option from sbatch

# Slurm sends TERM two minutes before the end, and when it preempts or requeues the job: training saves a checkpoint and
# ends with status 0, so that the job is COMPLETED. torchrun would end with 1 after any signal, and the job were FAILED.
srun --kill-on-bad-exit=1 "${CONTAINER[@]}" python "${SLURM_SUBMIT_DIR:-.}/pretrain_gpt.py" "$@" "${LOAD[@]}"
