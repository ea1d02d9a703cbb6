"""Train a draft for a target on text that the target wrote, and leave it where the other scripts can use it.

    python -m launch.train --config=configs/medusa.py --target=HF_DIR --data=data --workdir=runs/medusa
    python -m launch.train --config=configs/eagle.py --data=data --workdir=runs/eagle --config.training.epochs=5

--data: a folder that launch.distill wrote, or a JSONL file of conversations (OpenAI messages, ShareGPT). The same
command again goes on where it was stopped; another configuration needs another --workdir.
"""

import shlex
from pathlib import Path

from absl import flags

from launch import common
from specjax.telemetry import say
from train_drafts import loop
from train_drafts.step import Optimizer
from train_drafts.tasks import TASKS

flags.adopt_module_key_flags(common)
DATA = flags.DEFINE_string("data", None, "Folder of launch.distill, or a file of conversations.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, TensorBoard, draft.", required=True)


def run() -> None:
    config, workdir = common.CONFIG.value, Path(WORKDIR.value)
    if "task" not in config:
        raise ValueError("this config trains nothing; give --config=configs/medusa.py or configs/eagle.py")
    task, optimizer = TASKS[config.method](**config.task), Optimizer(**config.optimizer)
    training = loop.Training(**config.training)
    common.check_writable(workdir / "config.json")
    setup = common.setup(config.setup)
    engine = setup.open()
    say(common.device_line(engine))
    _, last = loop.run(engine, task, optimizer, training, Path(DATA.value), workdir)
    print(last.line())
    print("written:", workdir / "draft")
    print("see:", shlex.join(["tensorboard", "--logdir", str(workdir)]))
    bench = ["python", "-m", "launch.bench", "--config=configs/bench.py", *common.flags_of(setup)]
    compared = f"--methods=eager,{config.method}={workdir}"
    print("next:", shlex.join([*bench, compared, "--workloads=all", "--out=runs/bench"]))


if __name__ == "__main__":
    common.main(run)
