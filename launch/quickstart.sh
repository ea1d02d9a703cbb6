#!/usr/bin/env bash
# Sets everything up and benchmarks speculative decoding of a real chat model on twelve kinds of work.
#
#   bash launch/quickstart.sh              the accelerator is found by itself
#   bash launch/quickstart.sh --cpu        stay on the CPU
#   bash launch/quickstart.sh --minutes=3  time for the benchmark itself (default 7)
#   bash launch/quickstart.sh --train      first train Medusa heads for some minutes, then benchmark them too
#
# Under ten minutes on two cores the first time, installation included; --train takes a quarter of an hour more, and where it was
# stopped the same command again goes on with it. Results: runs/quickstart, with --train runs/quickstart-train.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

minutes=7 cpu='' train=''
for argument in "$@"; do
    case $argument in
        --cpu) cpu=1 ;;
        --train) train=1 ;;
        --minutes=*) minutes=${argument#*=} ;;
        -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "quickstart.sh does not know '$argument'; see --help" >&2; exit 2 ;;
    esac
done

extra=
if [ -n "$cpu" ]; then export JAX_PLATFORMS=cpu; else extra=$(accelerator_extra); fi
prepare "$extra"

if [ -n "$extra" ] && [ "$(.venv/bin/python -c 'import jax; print(jax.devices()[0].platform)')" = cpu ]; then
    echo "a $extra device is here, but JAX does not reach it (an old driver?); going on with the CPU" >&2
fi

# train_heads FOLDER: prices of this machine, the target's answers to our own prompts, and heads trained on them.
# Each step is left out, or goes on, where an earlier start has done it.
train_heads() {
    if [ ! -e "$1/costs.json" ]; then
        say "train 1 of 3: measuring what a pass costs here, about a minute"
        .venv/bin/python -m launch.costs --batch_sizes=1 --repeats=5 --nocycles --out="$1/costs.json"
    fi
    say "train 2 of 3: the target answers the prompts of train_drafts/prompts, none of which the benchmark asks"
    .venv/bin/python -m launch.distill --prompts=train_drafts/prompts/mixed.jsonl --max_new_tokens=128 --out="$1/answers"
    say "train 3 of 3: training Medusa heads on these answers; tensorboard --logdir $1/medusa"
    .venv/bin/python -m launch.train --config=configs/medusa.py --data="$1/answers" --workdir="$1/medusa" \
        --cost_table="$1/costs.json" --config.task.draft_vocab=4096 --config.training.features=True \
        --config.training.checkpoint_every=50
}

out=runs/quickstart methods=eager,lookup table=()
if [ -n "$train" ]; then
    out=runs/quickstart-train
    train_heads "$out"
    methods+=,medusa=$out/medusa table=(--cost_table="$out/costs.json")
fi

say "decoding twelve workloads by $methods, about $minutes minutes; results as they come in $out"
.venv/bin/python -m launch.bench --config=configs/bench.py --methods="$methods" --workloads=all \
    --prompts_per_workload=10 --max_new_tokens=64 --minutes="$minutes" --out="$out" ${table[@]+"${table[@]}"}

if [ -n "$train" ]; then
    say "what this shows"
    echo "These heads have seen minutes of training on about 150 short answers, which is little: where the table says"
    echo "slower, eager decoding is the better choice with this draft. README.md, 'Your model in five commands', says"
    echo "how to train on your own prompts for longer."
fi
