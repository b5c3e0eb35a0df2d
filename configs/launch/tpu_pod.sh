#!/usr/bin/env bash
# One process for each host of a TPU slice; JAX finds the hosts from the slice's own metadata. Give what
# `trillion-moe train` takes; the output lies on a disk that all hosts share (Filestore, or a bucket with gcsfuse):
#
#     TPU=my-slice ZONE=us-east5-a configs/launch/tpu_pod.sh --config kimi_k3_lora --mesh v5p_32 --model K3 \
#         --data rows.jsonl --output /mnt/shared/run
set -euo pipefail

: "${TPU:?is not set: the name of the slice}" "${ZONE:?is not set: the zone of the slice}"
printf -v flags ' %q' "$@"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "trillion-moe train$flags"
