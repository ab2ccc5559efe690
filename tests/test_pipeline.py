"""Stages of a pipeline compute what the whole model does, for any decoder; wrong stages are noticed."""

import copy
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import balanced
from deepspeed_recipes.training.model import draft, probe, transforms
from deepspeed_recipes.training.parallel import stages
from tests.small import language_families
from tests.tiers import tiered

FAMILIES = sorted(
    {model.config["model_type"] for family in language_families() for model in pages.page(family).SIZES.values()}
)
NOT_LISTED = ["apertus", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma2", "gpt_bigcode", "mpt", "phi", "qwen2_moe"]
"""Architectures that no page has."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(draft.TINY_MODEL)


def whole_model(model_type, tokenizer):
    known = [recipe.model.config for recipe in pages.listing() if recipe.model.config.get("model_type") == model_type]
    config = AutoConfig.for_model(**(known[0] if known else {"model_type": model_type}))
    return probe.draft_of(config, tokenizer, "eager", torch.float32)


CORE = ("bloom", "deepseek_v3", "falcon", "gemma3_text", "gpt2", "llama", "mixtral", "nemotron_h", "qwen3_5_text")


@pytest.mark.parametrize("model_type", tiered([*FAMILIES, *NOT_LISTED], CORE))
def test_stages_compute_what_the_whole_model_does(tokenizer, model_type):
    assert stages.staged_difference(whole_model(model_type, tokenizer)) == 0


def test_every_family_was_checked():
    assert len(FAMILIES) >= 25


def test_a_wrongly_cut_stage_is_noticed(tokenizer, monkeypatch):
    whole = whole_model("granite", tokenizer)
    monkeypatch.setattr(transforms, "_start_at", lambda whole, layer: None)
    assert stages.staged_difference(whole) > 0.1


def test_a_stage_holds_its_own_weights_by_their_own_names(tokenizer):
    whole = whole_model("qwen3", tokenizer)
    names = set(whole.state_dict())
    parts = []
    for layers in stages.stages(whole.config, 3):
        part = copy.deepcopy(whole)
        transforms.cut_to_stage(part, layers)
        parts.append(set(part.state_dict()))
    assert set.union(*parts) == names
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    for one, other in pairwise(parts):
        assert not (one & other) - tied


def test_models_without_the_usual_decoder_shape_are_refused(tokenizer):
    config = AutoConfig.for_model("opt", num_hidden_layers=2, hidden_size=32, num_attention_heads=2, ffn_dim=32)
    with pytest.raises(UserError, match="not a decoder of the usual shape"):
        stages.stages(config, 2)


@pytest.mark.parametrize(
    ("costs", "count", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([2, 1, 1, 5], 3, [1, 2, 1]),
        ([7, 1, 1, 7], 4, [1, 1, 1, 1]),
    ],
)
def test_stages_are_balanced(costs, count, sizes):
    parts = balanced(costs, count)
    assert [len(part) for part in parts] == sizes
    assert [index for part in parts for index in part] == list(range(len(costs)))


def test_the_head_counts(tokenizer):
    """A large vocabulary makes the last stage's layers fewer."""
    config = whole_model("llama", tokenizer).config
    config.vocab_size, config.tie_word_embeddings = 40_000, False
    config.num_hidden_layers = 12
    sizes = [len(part) for part in stages.stages(config, 4)]
    assert sizes[0] < sizes[1] and sizes[-1] < sizes[1]
