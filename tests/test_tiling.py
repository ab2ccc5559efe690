"""Tiles compute what the whole does: loss and gradients on a draft of every family, and the memory in use at once."""

import copy
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Layout
from deepspeed_recipes.training.data.collate import labelled_only, next_labels
from deepspeed_recipes.training.model import draft, transforms
from tests.small import language_families

FAMILIES = [family for family in language_families() if family != "tiny"]
MIXTURES = {"deepseek", "glm4_5", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "qwen3_5_moe", "qwen3_moe"}
UNNAMED = {"falcon_h1", "lfm2", "nemotron_h"}
"""Their layers have feed-forward parts of other names."""


def model_of(family: str) -> torch.nn.Module:
    """Return a random draft whose logits are far from even, so that scales and soft caps show."""
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    size = next(iter(pages.page(family).SIZES))
    config = draft.shrink(AutoConfig.for_model(**pages.page(family).SIZES[size].config), Draft(layers=2), tokenizer)
    config.initializer_range = 0.2
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    for name, value in (("logits_scaling", 8.0), ("final_logit_softcapping", 5.0)):
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def computed(model: torch.nn.Module, told: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients; `told`: the batch says which tokens are labelled."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, model.config.vocab_size, (2, 37), generator=generator)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3, -100)
    told_of = labelled_only(next_labels(labels)) if told else {}
    output = model(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(50), use_cache=False, **told_of)
    output.loss.backward()
    return output.loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("told", [False, True], ids=["of all tokens", "of the labelled tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_whole(family, told):
    whole = model_of(family)
    tiled = copy.deepcopy(whole)
    transforms.tile_loss(tiled)
    if family not in MIXTURES | UNNAMED:
        transforms.recompute_feed_forward(tiled, 4)
    loss, gradients = computed(whole)
    tiles_loss, tiles_gradients = computed(tiled, told)
    assert tiles_loss == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == tiles_gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (tiles_gradients[name] - gradient).abs().max() <= 1e-5 * largest, name


def test_a_label_that_is_left_out_is_noticed(monkeypatch):
    whole = model_of("llama3")
    tiled = copy.deepcopy(whole)
    transforms.tile_loss(tiled)
    right = labelled_only
    monkeypatch.setitem(globals(), "labelled_only", lambda following: right(following.where(following % 2 == 0, -100)))
    assert computed(tiled, told=True)[0] != pytest.approx(computed(whole)[0], rel=1e-2)


def test_logits_of_other_tokens_are_not_computed():
    model = model_of("llama3")
    transforms.tile_loss(model)
    tokens = torch.randint(5, model.config.vocab_size, (2, 600))
    labels = tokens.where(torch.arange(600) < 100, -100)
    scored = []
    for told in ({}, labelled_only(next_labels(labels))):
        with Products(model.config.vocab_size) as products:
            model(input_ids=tokens, labels=labels, use_cache=False, **told)
        scored.append(products.rows)
    assert scored == [2 * 599, 256]


def test_a_batch_without_a_label_has_a_loss_of_0_and_gradients():
    model = model_of("llama3")
    transforms.tile_loss(model)
    labels = torch.full((1, 40), -100)
    told = labelled_only(next_labels(labels))
    loss = model(input_ids=labels.clamp(5), labels=labels, use_cache=False, **told).loss
    loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in model.parameters())


def test_an_ignored_scale_is_noticed():
    for family, name in (("granite", "logits_scaling"), ("gemma3", "final_logit_softcapping")):
        whole = model_of(family)
        tiled = copy.deepcopy(whole)
        setattr(tiled.config, name, 2.0)
        transforms.tile_loss(tiled)
        assert computed(tiled)[0] != pytest.approx(computed(whole)[0], rel=1e-2), family


@pytest.mark.parametrize("family", sorted(MIXTURES | UNNAMED))
def test_experts_and_layers_without_the_usual_name_are_not_tiled(family):
    with pytest.raises(UserError, match="experts" if family in MIXTURES else "no module named mlp"):
        transforms.recompute_feed_forward(model_of(family), 4)


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        output = function(*arguments, **(options or {}))
        for made in output if isinstance(output, tuple | list) else (output,):
            if torch.is_tensor(made):
                self.elements = max(self.elements, made.numel())
        return output


class Products(TorchDispatchMode):
    """Counts the rows of matrix products as wide as the vocabulary."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        output = function(*arguments, **(options or {}))
        if function.overloadpacket.__name__ in ("mm", "addmm") and output.shape[-1] == self.columns:
            self.rows += len(output)
        return output


def test_whole_logits_never_exist():
    sizes = {}
    for name in ("whole", "tiled"):
        with FakeTensorMode(), Largest() as largest:
            model = model_of("qwen3")
            model.resize_token_embeddings(100_000, mean_resizing=False)
            if name == "tiled":
                transforms.tile_loss(model)
            tokens = torch.zeros((1, 2**14), dtype=torch.int64)
            masks = {"full_attention": None}  # or it would look at the values of tensors that have none
            model(input_ids=tokens, labels=tokens, attention_mask=masks, use_cache=False).loss.backward()
        sizes[name] = largest.elements
    assert sizes["whole"] >= 2**14 * 100_000 > 10 * sizes["tiled"]


def test_feed_forward_layers_save_inputs_and_outputs_only():
    model = model_of("llama3")
    whole = saved(model)
    transforms.recompute_feed_forward(model, 4)
    assert saved(model) < 0.3 * whole


def saved(model: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps of the first layer's feed-forward part, weights not counted."""
    kept: list[torch.Tensor] = []
    hidden = torch.randn(1, 512, model.config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda one: one):
        output = model.model.layers[0].mlp(hidden)
    assert output.shape == hidden.shape
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for place, size in held.items() if place not in weights)


@pytest.mark.parametrize(("length", "ranks", "tiles"), [(512, 1, 8), (512, 2, 4), (64, 1, 2)])
def test_a_tile_is_about_as_long_as_the_model_is_wide(length, ranks, tiles):
    recipe = replace(pages.find("llama3-8b", "full"), tiled_mlp=True, sequence_length=length)
    model = transforms.apply(model_of("llama3"), replace(recipe, layout=Layout(sequence=ranks)))
    assert model.config.hidden_size == 64 and model.model.layers[0].mlp.forward.args[1] == tiles


@pytest.mark.parametrize(
    "changes", [{"method": "dpo"}, {"layout": Layout(pipeline=2)}, {"router_aux_loss_coef": 0.01}], ids=str
)
def test_models_without_layers_to_tile_are_refused(changes):
    with pytest.raises(UserError, match="use tiled_loss=false"):
        replace(pages.find("llama3-8b", "full"), tiled_loss=True, **changes)
