#!/usr/bin/env bash
# verl with GRPO and R3, on one machine with 8 GPUs of 141 GB (H200).  verl starts the engines.  Not run.
#
#     MODEL=/shared/Qwen3-30B-A3B DATA=/shared/gsm8k bash train.sh
#
# Each GPU has one engine with all weights (61 GB) and its share of the trainer, whose parameters and optimizer are
# kept in host memory.  A refresh stages one copy of the weights for each engine in host memory, 488 GB in all.
set -euo pipefail

MODEL=${MODEL:-/shared/Qwen3-30B-A3B}
DATA=${DATA:-/shared/gsm8k}
export CUDA_DEVICE_MAX_CONNECTIONS=1

# What makes the engine Lockstep.  On a GPU its memory is not released between rollouts (free_cache_engine).
ENGINE=(
  actor_rollout_ref.model.external_lib=rollout.integrations.verl
  actor_rollout_ref.rollout.name=lockstep
  actor_rollout_ref.rollout.free_cache_engine=False
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.3
  actor_rollout_ref.rollout.max_model_len=1536
  actor_rollout_ref.rollout.max_num_seqs=128
  +actor_rollout_ref.rollout.engine_kwargs.lockstep.num_threads=8
)

# R3: the engine records the experts of each token, and Megatron replays them.
ROUTES=(
  actor_rollout_ref.rollout.enable_rollout_routing_replay=True
  actor_rollout_ref.actor.megatron.router_replay.mode=R3
)

# Ratios are taken from the engine's own log-probabilities.
CORRECTION=(
  actor_rollout_ref.rollout.calculate_log_probs=True
  algorithm.rollout_correction.rollout_is=token
)

TRAINER=(
  model_engine=megatron
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=False
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=64
  data.max_prompt_length=512
  data.max_response_length=1024
  data.filter_overlong_prompts=True
  data.truncation=error
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.top_p=1
  actor_rollout_ref.rollout.top_k=-1
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
  actor_rollout_ref.actor.use_kl_loss=False
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
  actor_rollout_ref.actor.megatron.param_offload=True
  actor_rollout_ref.actor.megatron.optimizer_offload=True
  actor_rollout_ref.actor.megatron.use_mbridge=True
  trainer.n_gpus_per_node=8
  trainer.nnodes=1
  trainer.logger='["console"]'
  trainer.project_name=lockstep
  trainer.experiment_name=qwen3-30b-a3b-r3
  trainer.save_freq=-1
  trainer.test_freq=10
  trainer.total_training_steps=200
)

python3 -m verl.trainer.main_ppo "${ENGINE[@]}" "${ROUTES[@]}" "${CORRECTION[@]}" "${TRAINER[@]}" "$@"
