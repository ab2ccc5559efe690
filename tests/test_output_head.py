"""Logits that a loss in tiles computes are those of the model's own head, in every architecture, or are not used."""

import copy
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Lora
from deepspeed_recipes.training.model import draft, output_head, probe, transforms
from tests.small import language_families, small
from tests.tiers import tiered

OWN_HEADS = {
    "mpt": {"logit_scale": 0.3},
    "inkling_text": {},
    "modernbert-decoder": {},
    "llama4_text": {},
    "recurrent_gemma": {},
}
"""Architectures whose heads tiles do not compute: a factor that transformers does not apply, one by another name,
layers before the matrix, no decoder apart from the head, a soft cap by another name."""
BERTS = {"bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"}
BERTS |= {"roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"}
"""Which have a layer before the head's matrix."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(draft.TINY_MODEL)


def config_of(family, tied):
    config = next(iter(pages.page(family).SIZES.values())).config
    return AutoConfig.for_model(**{**config, "tie_word_embeddings": tied}).get_text_config()


def is_core(case):
    family, tied = case
    return (not tied and family in ("gemma2", "glm4", "llama3", "phi4")) or family in ("falcon_h1", "granite", "tiny")


@pytest.mark.parametrize(("family", "tied"), tiered(product(language_families(), (True, False)), is_core))
def test_logits_in_tiles_are_the_models_own(tokenizer, family, tied):
    assert output_head.difference(config_of(family, tied), tokenizer) == ""


@pytest.mark.parametrize("kind", tiered(OWN_HEADS, ("mpt", "modernbert-decoder")))
def test_a_head_that_tiles_do_not_compute_is_found(tokenizer, kind):
    why = output_head.difference(AutoConfig.for_model(kind, **OWN_HEADS[kind]).get_text_config(), tokenizer)
    assert f"{kind}'s own differ from them by" in why or "cannot be compared" in why


def test_a_factor_that_is_multiplied_is_not_divided_by(tokenizer):
    config = AutoConfig.for_model("hyperclovax", logits_scaling=4.0)
    assert output_head.difference(config, tokenizer) == ""


def test_such_a_model_trains_on_whole_logits_or_not_at_all(tokenizer, tmp_path, capsys):
    config = draft.shrink(AutoConfig.for_model("recurrent_gemma"), Draft(layers=3), tokenizer)
    config.vocab_size = 256_000
    config.save_pretrained(tmp_path)
    recipe = small(tmp_path, tmp_path, sequence_length=4096)
    assert output_head.check(recipe, tokenizer).tiled_loss is False
    assert "tiled_loss=false: recurrent_gemma's own differ from them by" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"tiled_loss=true: recurrent_gemma's own .*; use tiled_loss=false"):
        output_head.check(small(tmp_path, tmp_path, tiled_loss=True), tokenizer)
    with pytest.raises(UserError, match="DPO computes logits in tiles: recurrent_gemma's own"):
        output_head.check(small(tmp_path, tmp_path, method="dpo"), tokenizer)
    whole = small(tmp_path, tmp_path, sequence_length=8)
    assert output_head.check(whole, tokenizer) is whole, "logits are small: there are no tiles"


def test_adapters_of_the_head_are_not_left_out(tokenizer, tmp_path, capsys):
    config = AutoConfig.for_model("llama", num_attention_heads=4, hidden_size=64, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    asked = {"lora": Lora(target_modules="q_proj,lm_head"), "sequence_length": 4096}
    assert output_head.check(small(tmp_path, tmp_path, **asked), tokenizer).tiled_loss is False
    assert "lora.target_modules=q_proj,lm_head includes the output head, whose" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"DPO computes .*target_modules=q_proj,lm_head .*; name other modules, or use"):
        output_head.check(small(tmp_path, tmp_path, method="dpo", **asked), tokenizer)
    kept = small(tmp_path, tmp_path, **asked | {"lora": Lora(target_modules="all-linear")})
    assert output_head.check(kept, tokenizer) is kept


@pytest.mark.every
def test_every_architecture_of_transformers_is_right_or_found(tokenizer):
    """Found by comparing two heads; right by the loss that a run computes."""
    right, wrong = set(), set()
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(kind).get_text_config()
            model = probe.draft_of(config, tokenizer, "eager", torch.float32)
            own = _loss(model, tokenizer)
        except Exception:  # no draft, or none that computes: a run refuses it, too
            continue
        try:
            found = output_head.distance(copy.deepcopy(model)) > probe.LEAK[torch.float32]
        except Exception:
            found = True
        if found:
            wrong.add(kind)
            continue
        right.add(kind)
        transforms.tile_loss(model)
        assert _loss(model, tokenizer) == pytest.approx(own, rel=1e-5), kind
    assert len(right) > 100 and {"cohere", "falcon_h1", "gemma2", "granite", "phimoe", "gptj"} <= right
    assert wrong >= {"inkling_text", "modernbert-decoder", "recurrent_gemma"}
    # ProphetNet computes logits from its streams for n-grams, not from the last hidden state.
    assert wrong - BERTS - set(OWN_HEADS) - {"llama4", "marian", "prophetnet"} == set()


@torch.no_grad()
def _loss(model, tokenizer):
    tokens = torch.randint(5, len(tokenizer), (2, 24), generator=torch.Generator().manual_seed(1))
    if "forward" not in vars(model):
        return cross_entropy(model(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    return model(input_ids=tokens, labels=tokens).loss.item()
