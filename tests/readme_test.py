"""The README's five commands, run as they stand there, on tiny targets of two families."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from checkpoints import save_folder

from specjax.bench import workloads
from specjax.loading.drafts import load_draft

ROOT = Path(__file__).parent.parent
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
VOCAB = 300
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: only the last answer keeps its thinking, and a switch leaves thinking out.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUESTIONS = [f"What is {a} and {b}?" for a in (2, 3, 5, 8) for b in (1, 4, 6, 9)]
FOLLOWED_UP = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "<think>one of many</think>Blue."},
    {"role": "user", "content": "And another?"},
]


def commands() -> str:
    """The block of shell commands in the README's section."""
    section = (ROOT / "README.md").read_text().split("\n## Your model in five commands\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (block,) = [block for block in blocks if "launch" in block]
    return block


def make_target(folder: Path, family: str, template: str) -> Path:
    """A tiny random model that reads and writes bytes; its other tokens are words that only it uses."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 1024, "bos_token_id": None}
    save_folder(folder, family, sizes | {"eos_token_id": SPECIAL.index("<|im_end|>")})
    pieces = [*SPECIAL, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"word{i}" for i in range(VOCAB - len(pieces))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return folder


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_there_are_five_commands_in_the_order_of_the_work():
    scripts = re.findall(r"^python -m launch\.(\w+)", commands(), re.MULTILINE)
    assert scripts == ["generate", "costs", "distill", "train", "bench"]


@pytest.mark.parametrize(
    ("family", "template", "draft_vocab"),
    [("llama", CHATML, 280), pytest.param("qwen3", THINKING, 0, marks=pytest.mark.slow)],
    ids=["llama", "qwen3"],
)
def test_the_five_commands_train_a_draft_that_bench_finds_lossless(family, template, draft_vocab, tmp_path):
    prompts = [*({"prompt": question} for question in QUESTIONS[:-1]), {"messages": FOLLOWED_UP}]
    variables = {
        "TARGET": make_target(tmp_path / "target", family, template),
        "PROMPTS": write_rows(tmp_path / "prompts.jsonl", prompts),
        "TEST": write_rows(tmp_path / "test.jsonl", [{"prompt": "How far is the moon?"}, {"prompt": QUESTIONS[-1]}]),
        "OUT": tmp_path / "out",
        "TOKENS": 24,
        "DRAFT_VOCAB": draft_vocab,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands()],
        cwd=ROOT,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    draft = load_draft(out / "medusa" / "draft")
    assert draft.target["name"] and draft.training["evaluation"]["step"] > 0
    assert (draft.token_ids is None) == (draft_vocab == 0)
    assert "medusa" in (out / "bench" / "report.md").read_text()
    runs = json.loads((out / "bench" / "results.json").read_text())["runs"]
    assert {run["lossless"] for run in runs if run["method"] == "medusa"} == {"tokens-equal"}


def test_the_quickstart_parses_and_explains_itself_without_setting_anything_up():
    done = subprocess.run(["bash", ROOT / "launch" / "quickstart.sh", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert "--train" in done.stdout and done.stdout.rstrip().endswith("runs/quickstart-train.")


def test_no_training_prompt_of_ours_is_a_benchmark_prompt():
    ours = workloads.load(str(ROOT / "train_drafts" / "prompts" / "mixed.jsonl"))
    theirs = {turn for prompt in workloads.load("all") for turn in prompt.turns}
    assert {prompt.task for prompt in ours} == set(workloads.WORKLOADS)
    assert not theirs & {turn for prompt in ours for turn in prompt.turns}
