"""A model's output head, for losses that compute logits themselves; checks that these equal the model's own logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head

from ...recipe.errors import UserError, first_line
from ...recipe.limits import tiles_loss
from ...recipe.methods import Distill
from ...recipe.recipe import Lora, Recipe, names
from .load import load_config
from .probe import LEAK, draft_of, off, random_tokens

SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Names of the factor of logits in configurations: Cohere, Muse, Falcon-H1."""


@dataclass(frozen=True)
class Head:
    """The output head, which turns a model's last hidden states into logits."""

    module: torch.nn.Module
    scale: float
    softcap: float | None
    vocabulary: int
    """Number of entries that count; models with one tokenizer have heads of several sizes, padded for speed."""

    @property
    def weights(self) -> list[torch.Tensor]:
        """The head's weight, [vocabulary, hidden], and its bias if it has one."""
        return [one for one in (self.module.weight, self.module.bias) if one is not None]

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [tokens, vocabulary], in fp32, of hidden states, [tokens, hidden].

        The weight and the bias are from `weights`; ZeRO-3 must have gathered them.
        """
        kept = None if bias is None else bias[: self.vocabulary]
        logits = linear(hidden, weight[: self.vocabulary], kept).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_of(model: PreTrainedModel, vocabulary: int) -> Head:
    """Return a model's head, with the factor and the soft cap that architectures apply to its logits."""
    config = model.config.get_text_config()
    scale = next((found for name in SCALES if (found := getattr(config, name, None)) is not None), 1.0)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        # Granite and MiniCPM divide by it, HyperCLOVA X multiplies.
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return Head(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None), vocabulary)


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None] = print) -> Recipe:
    """Return the recipe, without tiled logits if they would differ from the model's and the recipe does not need them.

    Reports a change of the recipe, and its reason, with `say`.
    """
    config = load_config(recipe).get_text_config()
    method = recipe.method
    by_method = method.tiles or isinstance(method, Distill) or method.rollouts
    if not by_method and not tiles_loss(recipe, config.vocab_size):
        if recipe.loss and tiles_loss(replace(recipe, loss=None), config.vocab_size):
            say("tiled_loss=false: loss reads whole logits, which tiles would have avoided")
        return recipe
    why = difference(config, tokenizer, recipe.lora)
    if not why:
        return recipe
    if by_method:
        fix = "name other modules, or use all-linear" if why.startswith("lora.") else "use another model"
        raise UserError(f"{method.title} computes logits in tiles: {why}; {fix}.")
    if recipe.tiled_loss:
        raise UserError(f"tiled_loss=true: {why}; use tiled_loss=false.")
    say(f"tiled_loss=false: {why}")
    return replace(recipe, tiled_loss=False)


def difference(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, lora: Lora | None = None) -> str:
    """Return why tiled logits differ from the model's own, found on a shrunken model; empty if they do not.

    Tiles read the weight of a head, so they differ if the head gets adapters.
    """
    kind = config.model_type
    try:
        model = draft_of(config, tokenizer)
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        if lora and any(f".{name}".endswith(f".{target}") for target in names(lora.target_modules)):
            return f"lora.target_modules={lora.target_modules} includes the output head, whose adapters tiles leave out"
        differs = distance(model)
    except Exception as error:  # a model's own code may raise anything
        return f"they cannot be compared with {kind}'s own on a shrunken model ({first_line(error)})"
    return f"{kind}'s own differ from them by {differs:.0e} of the largest" if differs > LEAK[torch.float32] else ""


@torch.no_grad()
def distance(model: PreTrainedModel) -> float:
    """Return how far a tiled loss's logits are from the model's own, relative to the largest; changes the model.

    Both tiled heads are compared: `Head`, and TRL's.
    """
    generator = torch.Generator().manual_seed(0)
    head = head_of(model, model.config.vocab_size)
    for weight in head.weights:  # a bias starts at zero, and a soft cap has an effect on large logits only
        weight += 0.5 * torch.randn(weight.shape, generator=generator)
    tokens = random_tokens(model.config, 2, 16)
    own = model(input_ids=tokens).logits.float()
    ours = head.logits(model.base_model(input_ids=tokens).last_hidden_state, *head.weights)
    likelihoods = own[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    add_fused_lm_head(model)
    fused = model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
    return max(off(ours, own), off(fused, likelihoods))
