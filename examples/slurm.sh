#!/usr/bin/env bash
# A Slurm job: one torchrun per node, which starts one process per GPU and connects to the first node.
#   sbatch --nodes 16 examples/slurm.sh --config examples/mixtral_8x22b.yaml --data-path corpus_text_document \
#     --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --save checkpoints --save-interval 500
# IMAGE=./megatron-native.sqsh runs the ranks in a container, with Slurm's plugin pyxis.
#SBATCH --job-name=pretrain
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
set -euo pipefail

FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
LOAD=()  # a requeued job resumes from its last checkpoint
for ((i = 1; i < $#; i++)); do
  if [[ ${!i} == --save ]]; then next=$((i + 1)) && LOAD=(--load "${!next}"); fi
done

CONTAINER=()
if [[ -n "${IMAGE:-}" ]]; then
  CONTAINER=(--container-image="$IMAGE" --container-mounts="$PWD" --container-workdir="$PWD")
fi

# Slurm sends TERM two minutes before the end: training then saves a checkpoint and ends.
srun --kill-on-bad-exit=1 "${CONTAINER[@]}" torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$FIRST:29500" \
  "${SLURM_SUBMIT_DIR:-.}/pretrain_gpt.py" "$@" "${LOAD[@]}"
