"""An EAGLE-3 layer for a target: what trains, how, and for how long.

    python -m launch.distill --prompts=prompts.jsonl --out=data
    python -m launch.train --config=configs/eagle.py --data=data --workdir=runs/eagle

The batch is one for two CPU cores; what trained the layer that ships with specjax is in specjax/shipped/README.md.
Devices that are faster than that take more at once: --config.training.tokens_per_batch=16384 and so on. EAGLE-1:
--config.task.variant=1 --config.task.steps=1 --config.task.scale=0.1 --config.task.regression=1 --config.task.noise=0.1
"""

from ml_collections import ConfigDict

from configs import smollm2
from configs.common import from_dataclass
from train_drafts.loop import Training
from train_drafts.step import Optimizer
from train_drafts.tasks import Eagle


def get_config():
    config = ConfigDict(
        {
            "method": "eagle",
            "setup": smollm2.get_config(),
            "task": from_dataclass(Eagle),
            "optimizer": from_dataclass(Optimizer),
            "training": from_dataclass(Training),
        }
    )
    config.training.tokens_per_batch = 1024
    return config
