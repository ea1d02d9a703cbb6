"""Medusa heads for a target: what trains, how, and for how long.

python -m launch.distill --prompts=prompts.jsonl --out=data
python -m launch.train --config=configs/medusa.py --data=data --workdir=runs/medusa
"""

from ml_collections import ConfigDict

from configs import smollm2
from configs.common import from_dataclass
from train_drafts.loop import Training
from train_drafts.step import Optimizer
from train_drafts.tasks import Medusa


def get_config():
    return ConfigDict(
        {
            "setup": smollm2.get_config(),
            "task": from_dataclass(Medusa),
            "optimizer": from_dataclass(Optimizer),
            "training": from_dataclass(Training),
        }
    )
