"""Stages of a pipeline: any decoder of transformers, unmodified, cut between its layers (`transforms.cut_to_stage`)."""

import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...recipe.compatibility import refusal
from ...recipe.errors import UserError
from ...recipe.layout import balanced
from ...recipe.recipe import Recipe
from .. import activation_checkpointing
from ..model import heads, load, probe, stored, transforms
from ..model_folder import base_model


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model that computes different logits in stages, by a shrunken model, before anything is loaded."""
    size = recipe.layout.pipeline
    if recipe.model.trust_remote_code or recipe.model.quantization != "none":
        raise refusal("foreign pipeline", size=size)
    whole = load.load_config(recipe)
    if type(whole) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal("pipeline of another class", size=size, kind=whole.model_type)
    load.say_left_out(recipe, stored.check(recipe.model.path, without_weights(recipe)))
    config = whole.get_text_config()
    try:
        difference = staged_difference(probe.draft_of(config, tokenizer, recipe.model.attention))
    except UserError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise refusal("pipeline not checked", size=size, kind=config.model_type, error=error) from error
    if difference > probe.LEAK[torch.float32]:
        raise refusal("pipeline differs", size=size, kind=config.model_type, difference=difference)


@torch.no_grad()
def staged_difference(whole: PreTrainedModel) -> float:
    """Return how far the logits of stages are from the whole model's, relative to the largest."""
    tokens = probe.random_tokens(whole.config, 1, 48)
    positions = torch.arange(48)[None]
    expected = whole(input_ids=tokens, position_ids=positions).logits
    passed = tokens
    for layers in stages(whole.config, 3):  # a first, a middle and a last stage
        part = copy.deepcopy(whole)
        transforms.cut_to_stage(part, layers)
        computed = transforms.run_stage(part, passed, positions)
        passed = computed[0] if isinstance(computed, tuple) else computed
    return probe.off(passed, expected)


def without_weights(recipe: Recipe) -> PreTrainedModel:
    """Return the whole model on the meta device, without adapters."""
    with torch.device("meta"):
        return heads.CLASSES[heads.trained_by(recipe)].from_config(
            load.load_config(recipe),
            dtype=load.DTYPES[recipe.precision],
            trust_remote_code=recipe.model.trust_remote_code,
        )


def stages(config: PreTrainedConfig, count: int) -> list[range]:
    """Return the layers of each stage, balanced by parameters; embedding, norm and head count too."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, trust_remote_code=base_model.remote_code_permitted())
    layers = transforms.decoder_layers(whole)
    before, after = transforms.before_and_after(whole)
    costs = [_size(layer) for layer in layers]
    costs[0] += sum(map(_size, before))
    costs[-1] += sum(map(_size, after)) + whole.get_output_embeddings().weight.numel()
    return balanced(costs, count)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Stage(nn.Module):
    """Consecutive layers of a model, with the embedding on the first stage, the norm and the head on the last."""

    def __init__(self, recipe: Recipe, layers: range) -> None:
        """Load the weights of `layers`, and those of the embedding or the head if they are this stage's.

        Instances of a subclass of the model's class are cut down to the stage before their weights are loaded:
        `from_pretrained` then does all its work, including conversions, quantisation and tied weights, and reads only
        the weights of this stage.
        """
        super().__init__()
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(load.load_config(recipe))]

        def init(model: PreTrainedModel, *arguments: object, **options: object) -> None:
            kind.__init__(model, *arguments, **options)
            transforms.cut_to_stage(model, layers)

        changes = {
            "__init__": init,
            "__module__": kind.__module__,
            "_keys_to_ignore_on_load_unexpected": [".*"],  # no warning: these are the weights of other stages
            "should_save_on_this_rank": lambda self, is_main_process: is_main_process,  # not only on the first rank
        }
        self.model = load.load_model(recipe, type(kind.__name__, (kind,), changes))
        if activation_checkpointing.of_layers(recipe):
            self.model.gradient_checkpointing_enable(activation_checkpointing.options(recipe))

    @property
    def embedding(self) -> nn.Module:
        """The input embedding of a stage that has one."""
        return self.model.get_input_embeddings()

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute this stage; return the same for the next stage, or the logits.

        Inputs are token ids (first stage, [sequences, length]) or hidden states ([sequences, length, width]), and
        position ids.
        """
        received, position_ids = inputs
        return transforms.run_stage(self.model, received, position_ids)
