"""Drafts that come with specjax: found for the weights that they were trained for, read, and small."""

from pathlib import Path

import pytest
from scripted import target

import specjax
from specjax import Engine, load_target, methods
from specjax.decode.request import Sampling
from specjax.loading import shipped
from specjax.loading.drafts import load_draft
from specjax.loading.eagle import load_eagle

FOLDER = Path(specjax.__file__).parent / "shipped"
LOADERS = {"medusa": load_draft, "eagle": load_eagle}


@pytest.fixture(scope="module")
def smollm2():
    return load_target()


@pytest.mark.parametrize("method", LOADERS)
def test_the_default_target_has_a_draft_of_its_own(smollm2, method):
    draft = LOADERS[method](shipped.find(method, smollm2))
    assert draft.target["fingerprint"] == smollm2.fingerprint
    assert draft.training["evaluation"]


@pytest.mark.parametrize("name", ["medusa:tree4", "eagle:tree8", "eagle+lookup"])
def test_a_method_without_a_folder_takes_it_and_writes_the_eager_text(smollm2, name):
    eager = Engine(smollm2, max_context=128)
    asked = "Name three colours of the rainbow.", Sampling(max_new_tokens=24)
    (want,), (got,) = eager.generate(*asked), eager.with_method(name).generate(*asked)
    assert got.tokens == want.tokens
    assert got.stats.tokens_per_cycle > 1.2


@pytest.mark.parametrize("name", ["medusa", "eagle:chain4", "medusa+lookup", "eagle+lookup"])
def test_a_target_without_one_is_told_so_in_one_sentence(name):
    learned = name.split(":")[0].split("+")[0]
    with pytest.raises(ValueError, match=f"no {learned} draft is shipped for .* train one and name its folder by"):
        methods.build(name, target())


def test_all_of_them_take_less_than_25_megabytes_and_have_a_card():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 25e6
    card = (FOLDER / "README.md").read_text()
    assert all(word in card for word in ("Data", "Recipe", "Figures", "Licence"))
