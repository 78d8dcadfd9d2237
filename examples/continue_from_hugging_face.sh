#!/usr/bin/env bash
# Continue training a Hugging Face model on 8 GPUs, and export the result as a Hugging Face model.
#   examples/continue_from_hugging_face.sh Meta-Llama-3-8B corpus.jsonl result
set -euo pipefail
MODEL=$1 TEXT=$2 RESULT=$3
HERE=$(cd "$(dirname "$0")/.." && pwd)

python "$HERE/tools/preprocess_data.py" --input "$TEXT" --output-prefix "$RESULT/corpus" \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" --append-eod --overwrite

torchrun --nproc-per-node 8 "$HERE/pretrain_gpt.py" --load-hf "$MODEL" --data-path "$RESULT/corpus_text_document" \
  --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 2 --overlap-grad-reduce --overlap-param-gather --bf16 \
  --micro-batch-size 1 --global-batch-size 64 --train-iters 2000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine \
  --lr-warmup-iters 50 --save "$RESULT/checkpoints" --save-interval 500

python "$HERE/tools/convert_checkpoint.py" --from native --to hf --load "$RESULT/checkpoints" --save "$RESULT/model"
