"""Tensor parallelism family by family: split over two ranks, a model computes what the whole one does."""

import pytest

from recipes.spec.limits import SPLIT
from recipes.spec.run_folder import read_json
from tests.workers import split_layers

EXACT = 1e-5
"""fp64 with norms in fp32, relative to the largest value; mistakes are off by 0.1."""
ROUNDED = 1e-3
"""The same in fp32."""
SHARDED = {
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo3",
    "phi3",
    "qwen3",
    "qwen3_5_text",
    "smollm3",
}
"""Model types that `tensor.shard` splits rightly; the rest of the catalogue it refuses."""


def said(ranks, folder, what):
    ranks.check(what, str(folder / "said.json"), log=folder / "log")
    return read_json(folder / "said.json")


@pytest.fixture(scope="module")
def sharded(ranks, tmp_path_factory):
    return said(ranks, tmp_path_factory.mktemp("sharded"), split_layers.shard_all)


def test_every_model_type_is_split_rightly_or_refused(sharded):
    assert len(sharded) >= 18
    for kind, found in sharded.items():
        if kind in SHARDED:
            assert found.get("split", 0) >= 8 and found["weights"], (kind, found)
            assert found["logits"] < EXACT and found["gradient"] < EXACT, (kind, found)
        else:
            assert found["error"].startswith("ValueError") and "no plan, or unknown styles" in found["error"], kind
    assert set(sharded) > SHARDED


def test_norms_of_local_heads_that_are_not_summed_are_noticed(ranks, tmp_path):
    wrong = said(ranks, tmp_path, split_layers.shard_wrongly)
    assert wrong["llama"]["gradient"] < EXACT, "it has none"
    assert wrong["qwen3"]["gradient"] > 0.1 and "_norm" in wrong["qwen3"]["worst"]


@pytest.fixture(scope="module")
def by_deepspeed(ranks, tmp_path_factory):
    return said(ranks, tmp_path_factory.mktemp("autotp"), split_layers.autotp_all)


def test_deepspeed_splits_rightly_what_the_layout_lets_through_and_nothing_else(by_deepspeed):
    for kind, found in by_deepspeed.items():
        right = "error" not in found and found["split"] >= 8 and found["weights"]
        right = right and found["logits"] < ROUNDED and found["gradient"] < ROUNDED
        assert right == (kind in SPLIT), (kind, found)
    assert set(by_deepspeed) > set(SPLIT)
