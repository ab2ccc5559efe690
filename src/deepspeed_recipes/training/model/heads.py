"""Output heads of models: logits over the vocabulary, scores of a sequence (a reward or classes), or none.

`start` initialises the head of a reward model or a classifier, which the files of a language model lack.

The head for a further token (MTP, `model.train_mtp`) is a decoder layer after the last one. At each position i it reads
the main model's last hidden state of i and the embedding of token i + 1, and predicts token i + 2 with the main model's
output matrix (DeepSeek-V3 report, arXiv:2412.19437, section 2.2). transformers 5.22 has such heads only for drafting
(`MtpModel`, whose loss raises TypeError). As a layer of the model, the head has the names of the published files, so
that it is loaded, sharded, checkpointed and saved like every other layer.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import pad
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import ModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ..model_folder.base_model import FURTHER_TOKEN, Head

CLASSES: dict[Head, Any] = {
    "vocabulary": AutoModelForCausalLM,
    "vision": AutoModelForImageTextToText,
    "scores": AutoModelForSequenceClassification,
    "none": AutoModel,
}
"""The class with which transformers loads a model with each head."""
NAMES = ("score", "classifier")
"""Names of the head in transformers' sequence-classification models; PEFT uses the same."""


def trained_by(recipe: Recipe) -> Head:
    """Return the head of the model that a recipe trains."""
    if recipe.model.vision:
        return "vision"
    return "scores" if recipe.method.scores else "none" if recipe.method.embeds else "vocabulary"


def options(labels: Sequence[str]) -> Json:
    """Return the arguments of `from_pretrained` for a classifier with these classes; a reward model has none."""
    if not labels:
        return {"num_labels": 1}
    return {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}


def outputs(output: Any) -> torch.Tensor:
    """Return the result of a forward pass: logits, or hidden states of a model without a head."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def start(model: PreTrainedModel, seed: int) -> None:
    """Initialise the head with random values that depend only on its name and the seed; a collective under ZeRO-3.

    transformers would draw them from the process's random state, which differs between ranks and after a resume.
    """
    width = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in NAMES:
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        with torch.no_grad(), GatheredParameters([parameter], modifier_rank=0):
            if parameter.numel():  # under ZeRO-3 the other ranks only take part
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)


SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors that published files hold once more for the head for a further token: copies of the main model's ends."""


def with_further_token(config: PreTrainedConfig, weight: float = 0.0) -> type[PreTrainedModel]:
    """Return the class of a language model with this configuration that also has its head for a further token.

    In training, the head's cross-entropy times `weight` is added to the loss. Both sums are divided by the number of
    tokens in the main loss, as in the report. Evaluation and generation leave the head out.
    """
    plain: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    index = config.num_hidden_layers

    class WithFurtherToken(plain):
        # The head uses the main model's own ends.
        _keys_to_ignore_on_load_unexpected = tuple(rf"\.layers\.{index}\.{name}" for name in SHARED)

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            layers = self.base_model.layers
            layers.append(_further_token_layer(type(layers[-1]))(config, index))
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor | None = None,
            labels: torch.Tensor | None = None,
            **given: object,
        ) -> ModelOutput:
            inputs = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, **given}
            if labels is None or not self.training:
                return super().forward(**inputs)
            seen: dict[str, object] = {}
            layers = self.base_model.layers
            hooks = (
                # Its mask, rotary embedding and documents' boundaries are those of the head.
                layers[index - 1].register_forward_pre_hook(lambda _, __, named: seen.update(named), with_kwargs=True),
                self.base_model.register_forward_hook(lambda _, __, output: seen.update(last=output.last_hidden_state)),
            )
            try:
                output = super().forward(**inputs)
            finally:
                for hook in hooks:
                    hook.remove()
            following = self.get_input_embeddings()(pad(input_ids[:, 1:], (0, 1)))
            seen["past_key_values"] = None
            logits = self.get_output_embeddings()(layers[index](seen.pop("last"), following, **seen))
            # Positions restart at every document, and the label two ahead may be in the next one.
            ahead = pad(labels[:, 2:], (0, 2), value=-100)
            if position_ids is not None:
                ahead = ahead.masked_fill(pad(position_ids[:, 2:], (0, 2)) != position_ids + 2, -100)
            further = self.loss_function(
                logits=logits,
                labels=None,
                vocab_size=self.config.vocab_size,
                shift_labels=ahead,
                num_items_in_batch=given.get("num_items_in_batch"),
            )
            return type(output)(**{**output, "loss": output.loss + weight * further})

    return type(plain.__name__, (WithFurtherToken,), {})  # config.json's `architectures`


def _further_token_layer(kind: type[nn.Module]) -> type[nn.Module]:
    class FurtherToken(kind):
        def __init__(self, config: PreTrainedConfig, index: int) -> None:
            super().__init__(config, index)
            norm, width = type(self.input_layernorm), config.hidden_size
            self.enorm, self.hnorm = norm(width, eps=config.rms_norm_eps), norm(width, eps=config.rms_norm_eps)
            self.eh_proj = nn.Linear(2 * width, width, bias=False)
            self.shared_head = nn.ModuleDict({"norm": norm(width, eps=config.rms_norm_eps)})

        def forward(self, hidden: torch.Tensor, following: torch.Tensor, **given: object) -> torch.Tensor:
            joined = self.eh_proj(torch.cat([self.enorm(following), self.hnorm(hidden)], dim=-1))
            return self.shared_head["norm"](super().forward(joined, **given))

    return type(kind.__name__, (FurtherToken,), {})  # listed in `_no_split_modules`


def save_further_token(model: PeftModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the head for a further token next to an adapter, named as in the base model's files; `state` is whole."""
    inner = model.get_base_model()
    start = f"{inner.base_model_prefix}.layers.{inner.config.num_hidden_layers}."
    named = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    own = revert_weight_conversion(inner, {name: one for name, one in named.items() if name.startswith(start)})
    save_file({name: one.contiguous() for name, one in own.items()}, folder / FURTHER_TOKEN, metadata={"format": "pt"})
