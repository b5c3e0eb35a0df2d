#!/usr/bin/env bash
# Several processes on this host as one run. Of CPUs each makes its own devices; of accelerators each takes all it sees,
# unless JAX_LOCAL_DEVICE_IDS or the like says which:
#
#     JAX_NUM_CPU_DEVICES=4 configs/launch/local.sh 2 trillion-moe train --config lora --mesh fsdp=8 ...
#
# TERM and INT go on to all of them. Ends with the first code that is not 0.
set -euo pipefail

if (($# < 2)) || [[ ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 PROCESSES COMMAND..." >&2
    exit 2
fi
count=$1
shift
# Two ports in a row, of which nobody listens on either now.
free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
port=$((20001 + RANDOM % 12000))
until free "$port" && free "$((port - 1))"; do port=$((20001 + RANDOM % 12000)); done
export TRILLION_MOE_COORDINATOR=${TRILLION_MOE_COORDINATOR:-127.0.0.1:$port} TRILLION_MOE_PROCESSES=$count

children=()
told=0
trap 'told=1; kill -TERM "${children[@]}" 2>/dev/null || true' TERM INT
for ((i = 0; i < count; i++)); do
    TRILLION_MOE_PROCESS=$i "$@" &
    children+=($!)
    ((told)) && kill -TERM "$!" 2>/dev/null # a signal came before this one was known
done
code=0
for child in "${children[@]}"; do
    while true; do
        one=0
        wait "$child" || one=$?
        kill -0 "$child" 2>/dev/null || break # else a signal has ended the wait, not the process
    done
    ((code)) || code=$one
done
exit "$code"
