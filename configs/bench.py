"""The benchmark's target: SmolLM2-135M-Instruct with room for its longest workload.

    python -m launch.bench --config=configs/bench.py --methods=eager,lookup --workloads=all --out=runs/bench

Figure to expect on two CPU cores: lookup at 1.33 times eager's speed at temperature 0, 0.97 at temperature 1.
"""

from configs.common import from_dataclass
from specjax.decode.setup import Setup


def get_config():
    config = from_dataclass(Setup)
    config.max_context = 4096
    config.chunk = 64  # the median prompt has 44 tokens, and passes over more are no cheaper per token on a CPU
    return config
