"""The reference: supervised fine-tuning in plain PyTorch, one process, whole batches, no library but transformers."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import LayerNorm
from torch.nn.functional import pad
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..recipe.files import Json
from .techniques import Settings

__all__ = ["Settings", "train"]


def train(
    folder: Path,
    data: Path,
    settings: Settings,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    optimize: Callable[[torch.nn.Module, Settings], torch.optim.Optimizer] | None = None,
    device: str = "cpu",
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return per step the loss, the gradient norm before clipping and numbers by layer, and the final weights.

    `prepare` changes the trained weights, for example to adapters; `optimize` returns another optimizer than AdamW. The
    weights are returned on the CPU.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = prepare(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)).to(device)
    optimizer = (optimize or adamw)(model, settings)
    conversations = [(tokens.to(device), learned.to(device)) for tokens, learned in examples(data, tokenizer, settings)]
    records = []
    for _ in range(settings.steps):
        sums = [summed_loss(model, *example, settings) for example in conversations]
        if settings.mean_of_means:
            loss = torch.stack([total / count for total, count, _ in sums]).mean()
        else:
            loss = torch.stack([total for total, _, _ in sums]).sum() / sum(count for _, count, _ in sums)
        loss = loss + settings.router_aux_loss_coef * sum(balance for _, _, balance in sums) / len(sums)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.grad *= settings.scaled_experts
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        gradients = {name: weight.grad.clone() for name, weight in trained.items()}
        before = {name: weight.detach().clone() for name, weight in trained.items()}
        norm = get_total_norm([one.to(torch.promote_types(one.dtype, torch.float32)) for one in gradients.values()])
        clip_grads_with_norm_(trained.values(), settings.clip or math.inf, norm)
        optimizer.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item()})
        records[-1]["layers"] = by_layer(gradients, before, {name: one.detach() for name, one in trained.items()})
    return records, {name: weight.cpu() for name, weight in model.state_dict().items()}


def by_layer(
    gradients: dict[str, torch.Tensor], before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    """Return by layer the gradient's norm, the update as a share of the weights, and the share of zero gradients."""
    layers: dict[str, list[str]] = {}
    for name in gradients:
        own = name.removeprefix("base_model.model.")
        layers.setdefault(re.sub(r"(layers\.\d+).*|\.\w+$", r"\1", own), []).append(name)
    found = {}
    for layer, names in layers.items():
        gradient, old, new = (torch.cat([one[name].flatten() for name in names]) for one in (gradients, before, after))
        moved = (new.double() - old.double()).norm() / old.double().norm()
        found[layer] = {"grad_norm": gradient.double().norm().item(), "dead": (gradient == 0).double().mean().item()}
        found[layer] |= {"update_ratio": moved.item()} if math.isfinite(moved) else {}
    return found


NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)")
"""Names of weights that transformers' Trainer does not decay, in addition to LayerNorm's. It does decay norms with
other names, such as Nemotron-H's `norm_f` and the `norm1` of Qwen's tower."""


def groups(model: torch.nn.Module, settings: Settings) -> list[Json]:
    """Return two parameter groups: with and without weight decay."""
    in_norms = {id(one) for part in model.modules() if isinstance(part, LayerNorm) for one in part.parameters()}
    plain: list[torch.nn.Parameter] = []
    exempt: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spared = id(parameter) in in_norms or NOT_DECAYED.search(name.lower())
            (exempt if spared and not settings.decay_everything else plain).append(parameter)
    return [{"params": plain, "weight_decay": settings.weight_decay}, {"params": exempt, "weight_decay": 0.0}]


def adamw(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(groups(model, settings), lr=settings.learning_rate, eps=settings.epsilon)


def worst(weight: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two weights, relative to the bound: 1e-5 plus 1e-4 of the weight."""
    return float(((weight - expected).abs() / (1e-5 + 1e-4 * expected.abs())).max())


def examples(
    data: Path, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each conversation's tokens and the mask of the learned ones, [1, length], padded to a multiple of 8."""
    found = []
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"]
        chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens = torch.tensor([chat["input_ids"]])
        learned = torch.tensor([chat["assistant_masks"]]).bool()
        learned = torch.ones_like(learned) if settings.learn_prompts else learned
        padding = (0, -tokens.shape[1] % 8)  # not in the loss, but routed
        found.append((pad(tokens, padding, value=tokenizer.pad_token_id), pad(learned, padding)))
    return found


def summed_loss(
    model: PreTrainedModel, tokens: torch.Tensor, learned: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a conversation's summed loss, its number of learned tokens, and its load-balancing loss."""
    routed: Json = {}
    if settings.router_aux_loss_coef:
        routed = {"output_router_logits": True, "attention_mask": (tokens != model.config.pad_token_id).long()}
    output = model(input_ids=tokens, use_cache=False, **routed)
    # As transformers' losses do: 16-bit logits would round the loss itself.
    logits = output.logits[:, :-1].to(torch.promote_types(output.logits.dtype, torch.float32))
    log_probabilities = logits.log_softmax(-1)
    chosen = log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
    return -(chosen * learned[:, 1:]).sum(), learned[:, 1:].sum(), output.aux_loss if routed else 0.0
