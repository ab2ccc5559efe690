"""Checks on a shrunken model, not by name, that tokens attend to the tokens before them in their document alone."""

import math
from collections.abc import Callable

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...recipe.errors import UserError, first_line
from ...recipe.recipe import Recipe
from . import attention, probe
from .draft import WINDOW
from .load import cannot_load, load_config

LENGTHS = (WINDOW + 8, WINDOW + 24)
"""Tokens per packed document: longer than a draft's windows and chunks, whose borders are elsewhere in the second
document than in the sequence."""


def check(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, on_gpu: bool = False, say: Callable[[str], None] = print
) -> str:
    """Return the attention that the run computes with: the first candidate with which packing is correct.

    Takes about a second, before the ranks load anything. Reports faster candidates that were refused with `say`.

    Raises:
        UserError: packed documents would attend to each other, or this cannot be checked, or a model that is to write
            attends to later tokens.
    """
    config = load_config(recipe).get_text_config()
    # BERT and its kin, which transformers also loads as models that write; others have no such key, or always write.
    if getattr(config, "is_decoder", None) is False and not recipe.method.headless and sees_later(config, tokenizer):
        raise UserError(
            f"model.path={recipe.model.path}: tokens of {config.model_type} attend to later ones, so the model would "
            "learn to copy its next token;\nuse classify or embed, or set is_decoder to true in its config.json."
        )
    names = attention.candidates(recipe, config, on_gpu)
    if not recipe.packs:
        return names[0]
    for name in names:
        try:
            if keeps_documents_apart(config, tokenizer, name):
                return name
            why = "packed documents attend to each other"
        except Exception as error:  # a model's own code may raise anything
            why = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, ImportError) and recipe.model.attention != "auto":
                raise UserError(attention.not_installed(name, error)) from error
            if name == names[-1]:
                if isinstance(error, KeyError | FloatingPointError):  # no draft can be built, packed or not
                    raise UserError(cannot_load("model", recipe, error)) from error
                raise UserError(
                    f"packing=true: cannot be checked on a shrunken {config.model_type}: {error}\nAdd packing=false."
                ) from error
        if name != names[-1]:
            say(f"model.attention: not {name} in {config.model_type} ({why})")
    raise UserError(
        f"packing=true: in {config.model_type} with model.attention={names[-1]} the documents of a packed sequence "
        "attend to each other; add packing=false."
    )


def keeps_documents_apart(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return whether documents in one sequence, separated by their position ids, get the same logits as each alone.

    Args:
        config: of the real model; a draft of its class with every kind of its layers is created from it.
        tokenizer: for the size of the vocabulary.
        name: the implementation to try, as in `from_pretrained(attn_implementation=...)`.
    """
    dtype = probe.check_dtype(name)
    model = probe.draft_of(config, tokenizer, name, dtype)
    leaked = leak(model)
    if not math.isfinite(leaked):
        raise FloatingPointError("a random model of it computes no finite logits")
    apart = leaked < probe.LEAK[dtype]
    if dtype == torch.bfloat16:
        check_gradients(model)
    return apart


@torch.no_grad()
def sees_later(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the last token changes the logits of those before it."""
    model = probe.draft_of(config, tokenizer)
    tokens = probe.random_tokens(model.config, 1, WINDOW).to(model.device)
    changed = tokens.clone()
    changed[0, -1] += 1 if tokens[0, -1] < model.config.vocab_size - 1 else -1
    before, after = (model(input_ids=one).logits[:, :-1] for one in (tokens, changed))
    return probe.off(after, before) > probe.LEAK[torch.float32]


@torch.no_grad()
def leak(model: torch.nn.Module) -> float:
    """Return how far the logits of packed documents are from those of each alone, relative to the largest."""
    documents = _documents(model)
    packed = model(**_packed(documents, model)).logits[0]
    alone = torch.cat([model(input_ids=document[None]).logits[0] for document in documents])
    return probe.off(packed, alone)


def check_gradients(model: torch.nn.Module) -> None:
    """Compute the gradients of packed documents: a kernel's backward pass may have narrower limits than its forward.

    Raises:
        ArithmeticError: they are not finite.
        Exception: the kernel has no backward pass for this model on this GPU.
    """
    model(**_packed(_documents(model), model)).logits.float().square().mean().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    if not gradients or not all(bool(one.isfinite().all()) for one in gradients):
        raise ArithmeticError("gradients are not finite")


def _documents(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    return probe.random_tokens(model.config, 1, sum(LENGTHS))[0].to(model.device).split(LENGTHS)


def _packed(documents: tuple[torch.Tensor, ...], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.cat(documents)[None], "position_ids": positions[None]}
    if attention.needs_boundaries(model):
        inputs |= attention.document_boundaries([LENGTHS], sum(LENGTHS))
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
