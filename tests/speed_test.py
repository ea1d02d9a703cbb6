"""Speed against an independent implementation: a slow eager baseline would flatter every draft."""

import time

import numpy as np
import pytest
from parity_test import smollm2_in_transformers

import specjax

NEW, ROUNDS = 64, 5


@pytest.mark.slow
def test_eager_is_not_slower_than_transformers_generate(capsys):
    """Alternating, end to end (prefill included), the same float32 weights, prompt and number of tokens."""
    torch = pytest.importorskip("torch", reason="torch is a test extra: pip install torch")
    model, engine = smollm2_in_transformers(), specjax.Setup(max_context=512, chunk=64).open()
    prompt = engine.encode("Explain in a few sentences how a sailing boat can move against the wind.")
    sampling = specjax.Sampling(max_new_tokens=NEW, ignore_end=True)
    ids = torch.tensor([prompt])

    def ours():
        return len(engine.generate(prompt, sampling)[0].tokens)

    def theirs():
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
            )
        return out.shape[1] - ids.shape[1]

    rates = {ours: [], theirs: []}
    for _ in range(ROUNDS + 1):  # the first round warms up
        for run in rates:
            start = time.perf_counter()
            tokens = run()
            rates[run].append(tokens / (time.perf_counter() - start))
    eager, reference = (float(np.median(rate[1:])) for rate in rates.values())
    with capsys.disabled():
        print(f"\neager {eager:.1f} tokens/s, transformers {reference:.1f} tokens/s: {eager / reference:.2f} times")
    assert eager >= 0.9 * reference  # the machine's noise; what was measured stands in README.md
