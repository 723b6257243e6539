#!/usr/bin/env bash
# The engine: one Lockstep server for slime, on a machine with a GPU of 80 GB.  Not run.
#
#     HOST=10.0.0.7 SHARED=/shared bash serve.sh
set -euo pipefail

MODEL=${MODEL:-/shared/Qwen3-30B-A3B}
HOST=${HOST:?the address of this machine that the trainer can reach}
PORT=${PORT:-10090}
SHARED=${SHARED:-/shared}

# slime sends no key, so keep this in a network of its own.
# Routes are recorded for R3, and returned without being asked for: SGLang's router drops the request's field.
# Weights may come from the folder of updates, and from nowhere else.
exec lockstep serve "$MODEL" \
  --host "$HOST" \
  --port "$PORT" \
  --allow-unauthenticated \
  --dtype bfloat16 \
  --context-length 10240 \
  --mem-fraction-static 0.8 \
  --enable-return-routed-experts \
  --return-routed-experts-by-default \
  --weight-folders "$SHARED/updates"
