#!/usr/bin/env bash
# Sets everything up and benchmarks speculative decoding of a real chat model on twelve kinds of work.
#
#   bash launch/quickstart.sh              the accelerator is found by itself
#   bash launch/quickstart.sh --cpu        stay on the CPU
#   bash launch/quickstart.sh --minutes=3  time for the benchmark itself (default 7)
#
# Under ten minutes on two cores the first time, installation included. Results: runs/quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

minutes=7 cpu=
for argument in "$@"; do
    case $argument in
        --cpu) cpu=1 ;;
        --minutes=*) minutes=${argument#*=} ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "quickstart.sh does not know '$argument'; see --help" >&2; exit 2 ;;
    esac
done

extra=
if [ -n "$cpu" ]; then export JAX_PLATFORMS=cpu; else extra=$(accelerator_extra); fi
prepare "$extra"

if [ -n "$extra" ] && [ "$(.venv/bin/python -c 'import jax; print(jax.devices()[0].platform)')" = cpu ]; then
    echo "a $extra device is here, but JAX does not reach it (an old driver?); going on with the CPU" >&2
fi

say "decoding twelve workloads eagerly and by lookup, about $minutes minutes; results as they come in runs/quickstart"
exec .venv/bin/python -m launch.bench --config=configs/bench.py --methods=eager,lookup --workloads=all \
    --prompts_per_workload=10 --max_new_tokens=64 --minutes="$minutes" --out=runs/quickstart
