#!/usr/bin/env bash
# The trainer: slime with GRPO and R3 on 8 GPUs, and a Lockstep engine that runs already (serve.sh).  Not run.
#
#     ENGINES="10.0.0.7:10090" SLIME=/root/slime bash train.sh
set -euo pipefail

ENGINES=${ENGINES:?addresses of the engines, with spaces between}
SLIME=${SLIME:-/root/slime}
MEGATRON=${MEGATRON:-/root/Megatron-LM}
SHARED=${SHARED:-/shared}
read -r -a ENGINE_ADDRS <<<"$ENGINES"

# slime's own file: MODEL_ARGS, the sizes of the model for Megatron.
source "$SLIME/scripts/models/qwen3-30B-A3B.sh"

CKPT_ARGS=(
  --hf-checkpoint "$SHARED/Qwen3-30B-A3B"
  --ref-load "$SHARED/Qwen3-30B-A3B_torch_dist"
  --save "$SHARED/Qwen3-30B-A3B_slime"
  --save-interval 20
)

# Engines that run already.  There is no --colocate: the engine has its own GPUs.
ENGINE_ARGS=(
  --rollout-external-engine-addrs "${ENGINE_ADDRS[@]}"
)

# Weights go through a folder that both machines see.  No NCCL group between trainer and engine is needed.
# For deltas: --update-weight-mode delta, and --update-weight-local-checkpoint-dir on a disk of the engine.
WEIGHT_ARGS=(
  --update-weight-mode full
  --update-weight-transport disk
  --update-weight-disk-dir "$SHARED/updates"
)

# R3: the trainer follows the experts that the engine chose.
ROUTE_ARGS=(
  --use-rollout-routing-replay
)

ROLLOUT_ARGS=(
  --prompt-data "$SHARED/dapo-math-17k/dapo-math-17k.jsonl"
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rollout-shuffle
  --rm-type deepscaler
  --num-rollout 3000
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-response-len 8192
  --rollout-temperature 1.0
  --global-batch-size 256
  --balance-data
)

# The ratio of trainer to engine is taken from the engine's own log-probabilities.
GRPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --use-tis
)

PERF_ARGS=(
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 8
  --expert-tensor-parallel-size 1
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 20480
)

OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
  --optimizer-cpu-offload
  --overlap-cpu-optimizer-d2h-h2d
  --use-precision-aware-optimizer
)

MISC_ARGS=(
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend flash
)

mkdir -p "$SHARED/updates"
ray start --head --num-gpus 8 --disable-usage-stats
cd "$SLIME"
ray job submit --address http://127.0.0.1:8265 \
  --runtime-env-json "{\"env_vars\": {\"PYTHONPATH\": \"$MEGATRON\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}" \
  -- python3 train.py \
  --actor-num-nodes 1 \
  --actor-num-gpus-per-node 8 \
  "${MODEL_ARGS[@]}" \
  "${CKPT_ARGS[@]}" \
  "${ENGINE_ARGS[@]}" \
  "${WEIGHT_ARGS[@]}" \
  "${ROUTE_ARGS[@]}" \
  "${ROLLOUT_ARGS[@]}" \
  "${GRPO_ARGS[@]}" \
  "${PERF_ARGS[@]}" \
  "${OPTIMIZER_ARGS[@]}" \
  "${MISC_ARGS[@]}"
