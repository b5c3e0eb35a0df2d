#!/usr/bin/env bash
# One process for each GPU of some nodes; JAX finds its number, its GPU and process 0 from what srun sets. Give what
# `trillion-moe train` takes, on a disk that all nodes share:
#
#     sbatch --nodes 2 configs/launch/slurm.sh --config kimi_k3_lora --mesh h200x16 --model K3 --data rows.jsonl \
#         --output /shared/run
#
# Each process reads of the model what its GPU has, so eight on a node need no more of the host than one would.
# A run that is preempted or loses a node ends on all nodes and goes on from its last checkpoint when it is requeued.
#SBATCH --job-name=trillion-moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
set -euo pipefail

# Between GPUs whose processes all live NCCL waits for ever; so long, and XLA ends the process, which ends the others.
export XLA_FLAGS="--xla_gpu_nccl_termination_timeout_seconds=600 ${XLA_FLAGS:-}"

# --kill-on-bad-exit: what our own processes do not end, srun does.
srun --kill-on-bad-exit=1 --wait=60 trillion-moe train "$@"
