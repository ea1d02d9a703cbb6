"""Medusa heads for a target: what trains, how, and for how long.

    python -m launch.distill --prompts=prompts.jsonl --out=data
    python -m launch.train --config=configs/medusa.py --data=data --workdir=runs/medusa

The values are those that trained SmolLM2-135M-Instruct's heads on two CPU cores (README.md, Figures). Devices that are
faster than that take more at once: --config.training.tokens_per_batch=16384 and so on.

Figure to expect: 1.62 tokens per cycle with trees of 8 nodes at T = 0, mean of twelve workloads, after 1.3 million
answer tokens.
"""

from ml_collections import ConfigDict

from configs import smollm2
from configs.common import from_dataclass
from train_drafts.loop import Training
from train_drafts.step import Optimizer
from train_drafts.tasks import Medusa


def get_config():
    config = ConfigDict(
        {
            "method": "medusa",
            "setup": smollm2.get_config(),
            "task": from_dataclass(Medusa),
            "optimizer": from_dataclass(Optimizer),
            "training": from_dataclass(Training),
        }
    )
    config.task.heads = 3  # the best trees of 8 nodes are no deeper
    config.task.loss = "kl"
    config.optimizer.learning_rate = 3e-3
    config.training.tokens_per_batch = 512
    config.training.epochs = 4
    return config
