"""The reference of classification and embeddings: plain PyTorch, one process, each text by itself, no padding."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from deepspeed_recipes.prove.plain import Settings
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.training.model import heads
from deepspeed_recipes.training.model import lora as adapters

SEED = 42
SETTINGS = Settings(learning_rate=1e-3)
ADAPTERS = Lora(rank=4, alpha=8)
TEMPERATURE = 0.05
MISTAKES = {
    "classify": ("label", "weights", "sum of weights", "doubled"),
    "embed": (
        "temperature",
        "pooling",
        "no gradient through the gather",
        "own rank",
        "equal texts",
        "no negatives",
        "one negative",
    ),
}


def train(method: str, folder: Path, data: Path, lora: bool, mistake: str = "") -> tuple[list[dict[str, float]], dict]:
    """Return per step the loss and the gradient norm before clipping, and the final weights as they are exported."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    model = MODELS[method](folder, rows)
    if lora:
        model = adapters.add(model, ADAPTERS, SEED, scores=method == "classify", embeds=method == "embed")
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    groups = [
        {"params": [one for name, one in trained.items() if "norm" not in name], "weight_decay": SETTINGS.weight_decay},
        {"params": [one for name, one in trained.items() if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.learning_rate, eps=SETTINGS.epsilon)
    tokenizer, records = AutoTokenizer.from_pretrained(folder), []
    for _ in range(SETTINGS.steps):
        loss = LOSSES[method](model, tokenizer, rows, mistake)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), SETTINGS.clip)
        optimizer.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item()})
    state = get_peft_model_state_dict(model) if isinstance(model, PeftModel) else model.state_dict()
    return records, {name: weight.detach().clone() for name, weight in state.items()}


def classifier(folder: Path, rows: list[dict]) -> Any:
    """Return the model with a head for the classes of the rows."""
    number = len({row["label"] for row in rows})
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=number, dtype=torch.float32)
    heads.start(model, SEED)
    return model


def classify_loss(model: Any, tokenizer: Any, rows: list[dict], mistake: str) -> torch.Tensor:
    """Return the mean cross-entropy, in which classes weigh the same.

    Mistakes: `label`, classes are exchanged; `weights`, there are none; `sum of weights`, as in PyTorch's own mean;
    `doubled`, as transformers' Trainer does on two ranks.
    """
    names = sorted({row["label"] for row in rows}, reverse=mistake == "label")
    counts = [sum(row["label"] == name for row in rows) for name in names]
    losses, weights = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([tokenizer(row["text"])["input_ids"]])).logits[0]
        number = names.index(row["label"])
        losses.append(logits.logsumexp(0) - logits[number])
        weights.append(1.0 if mistake == "weights" else len(rows) / (len(names) * counts[number]))
    if mistake == "sum of weights":  # of each rank's half, which the ranks would average
        halves = [slice(0, 4), slice(4, 8)]
        return sum(weighted(losses[half], weights[half]) / sum(weights[half]) for half in halves) / 2
    return weighted(losses, weights) / len(rows) * (2 if mistake == "doubled" else 1)


def weighted(losses: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Return the weighted sum."""
    return sum((weight * loss for weight, loss in zip(weights, losses, strict=True)), torch.zeros(()))


def encoder(folder: Path, rows: list[dict]) -> Any:
    """Return the model without a head."""
    return AutoModel.from_pretrained(folder, dtype=torch.float32)


def embed_loss(model: Any, tokenizer: Any, rows: list[dict], mistake: str) -> torch.Tensor:
    """Return the mean InfoNCE with the texts of all rows.

    Mistakes: `temperature`; `pooling`; `no gradient through the gather`, the other rank's texts are constants; `own
    rank`, they are left out; `equal texts`, those equal to the right one are negatives; `no negatives`, the rows' own
    are left out; `one negative`, all but the first of them are.
    """
    pooling = "last" if mistake == "pooling" else "mean"
    sides = [[row["anchor"], row["positive"], *row["negative"]] for row in rows]
    anchors, *others = (
        torch.cat([vector(model, tokenizer, text, pooling) for text in texts]) for texts in zip(*sides, strict=True)
    )
    others = others[0] if mistake == "no negatives" else torch.cat(others[:2] if mistake == "one negative" else others)
    texts = [row[at] for at in range(1, len(sides[0])) for row in sides]
    losses = []
    for number, row in enumerate(rows):
        seen = torch.tensor([at % 8 // 4 == number // 4 for at in range(len(others))])
        candidates = others
        if mistake == "no gradient through the gather":
            candidates = torch.where(seen[:, None], others, others.detach())
        similar = candidates @ anchors[number] / (0.1 if mistake == "temperature" else TEMPERATURE)
        left_out = torch.tensor([at != number and texts[at] == row["positive"] for at in range(len(others))])
        if mistake == "equal texts":
            left_out = torch.zeros_like(left_out)
        if mistake == "own rank":
            left_out |= ~seen
        losses.append(similar[~left_out].logsumexp(0) - similar[number])
    return torch.stack(losses).mean()


def vector(model: Any, tokenizer: Any, text: str, pooling: str) -> torch.Tensor:
    """Return a text's vector, [1, hidden size]."""
    states = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
    return normalize(states[:, -1] if pooling == "last" else states.mean(1), dim=-1)


MODELS = {"classify": classifier, "embed": encoder}
LOSSES = {"classify": classify_loss, "embed": embed_loss}
