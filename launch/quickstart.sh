#!/usr/bin/env bash
# Sets everything up and benchmarks speculative decoding of a real chat model on twelve kinds of work.
#
#   bash launch/quickstart.sh              the accelerator is found by itself
#   bash launch/quickstart.sh --cpu        stay on the CPU
#   bash launch/quickstart.sh --minutes=3  time for the benchmark itself (default 7)
#   bash launch/quickstart.sh --train      first train Medusa heads for some minutes, and benchmark these instead of the shipped ones
#
# The drafts are those that come with specjax, so nothing is trained. A quarter of an hour on two cores; --train takes a quarter of
# an hour more, and where it was stopped the same command again goes on with it. Results: runs/quickstart, with --train runs/quickstart-train.
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

out=runs/quickstart medusa=medusa
if [ -n "$train" ]; then out=runs/quickstart-train; fi

if [ ! -e "$out/costs.json" ]; then
    say "measuring what a pass and a draft cost here, about two minutes"
    .venv/bin/python -m launch.costs --batch_sizes=1 --repeats=5 --nocycles --methods=medusa,eagle --out="$out/costs.json"
fi

# train_heads FOLDER: the target's answers to our own prompts, and heads trained on them. Each step goes on where an
# earlier start has stopped.
train_heads() {
    say "train 1 of 2: the target answers the prompts of train_drafts/prompts, none of which the benchmark asks"
    .venv/bin/python -m launch.distill --prompts=train_drafts/prompts/mixed.jsonl --max_new_tokens=128 --out="$1/answers"
    say "train 2 of 2: training Medusa heads on these answers; tensorboard --logdir $1/medusa"
    .venv/bin/python -m launch.train --config=configs/medusa.py --data="$1/answers" --workdir="$1/medusa" \
        --cost_table="$1/costs.json" --config.task.draft_vocab=4096 --config.training.features=True \
        --config.training.checkpoint_every=50
}

if [ -n "$train" ]; then
    train_heads "$out"
    medusa=medusa=$out/medusa
fi

methods=eager,lookup,$medusa,eagle,eagle+lookup
say "decoding twelve workloads by $methods, about $minutes minutes; results as they come in $out"
.venv/bin/python -m launch.bench --config=configs/bench.py --methods="$methods" --workloads=all --cost_table="$out/costs.json" \
    --prompts_per_workload=10 --max_new_tokens=64 --minutes="$minutes" --out="$out"

if [ -n "$train" ]; then
    say "what this shows"
    echo "These Medusa heads have seen minutes of training on about 150 short answers, which is little: where the table says"
    echo "slower, eager decoding is the better choice with this draft. README.md, 'Your model in five commands', says"
    echo "how to train on your own prompts for longer."
fi
