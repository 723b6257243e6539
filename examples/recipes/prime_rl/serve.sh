#!/usr/bin/env bash
# The engine: one Lockstep server for prime-rl, on a machine with a GPU of 80 GB.  Not run.
#
#     HOST=10.0.0.7 SHARED=/shared bash serve.sh
set -euo pipefail

MODEL=${MODEL:-/shared/Qwen3-30B-A3B-Instruct-2507}
HOST=${HOST:?the address of this machine that the trainer can reach}
PORT=${PORT:-8000}
SHARED=${SHARED:-/shared}

# The name is the one of rl.toml: prime-rl looks for it in /v1/models.
# Routes are recorded for R3, in the form that prime-rl reads.
# Weights may come from prime-rl's output folder, and from nowhere else.
exec lockstep serve "$MODEL" \
  --served-model-name Qwen/Qwen3-30B-A3B-Instruct-2507 \
  --host "$HOST" \
  --port "$PORT" \
  --allow-unauthenticated \
  --dtype bfloat16 \
  --context-length 16384 \
  --mem-fraction-static 0.8 \
  --enable-return-routed-experts \
  --vllm-routed-experts dict \
  --weight-folders "$SHARED/prime-rl"
