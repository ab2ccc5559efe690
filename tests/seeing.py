"""Small models that see and conversations with pictures, made on the spot, and the plain loop beside them."""

import json
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from deepspeed_recipes.prove import plain
from deepspeed_recipes.prove.techniques import Settings, of_settings
from deepspeed_recipes.recipe.recipe import Model, Recipe
from deepspeed_recipes.training.model import draft
from deepspeed_recipes.training.model import processor as vision

DEFAULT = Settings()
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # wrong gradients show
    "vocab_size": 512,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
    "image_size": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 4,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
    "idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "idefics3_vision"},
        "scale_factor": 2,
    },
    "qwen2_5_vl": {
        "text_config": {
            **{name: size for name, size in TEXT.items() if name != "head_dim"},
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
    },
}
"""Dimensions of models of each kind."""


def seeing(kind: str, **changes: Any) -> Model:
    """Return a model that sees, for a recipe; it has no weights yet."""
    return Model(path=kind, config={"model_type": kind, **KINDS[kind]}, vision=True, **changes)


def models(factory: Any) -> Callable[[str], Path]:
    """Return a function that gives the folder of a random model of a kind, made once; `factory` makes folders."""
    return cache(lambda kind: write_model(factory.mktemp(kind), kind))


def write_model(folder: Path, kind: str) -> Path:
    """Write a random model that sees with its processor, as a draft of it is, and return its folder."""
    draft.write(recipe_for(folder, folder, "zero0.json", model=seeing(kind)), folder, torch.float32)
    return folder


def recipe_for(folder: Path, data: Path, deepspeed: str, settings: Settings = DEFAULT, **changes: Any) -> Recipe:
    """Return a recipe that trains a model that sees on all of eight examples in every step."""
    vision = changes.pop("model", None) or Model(path=str(folder), vision=True)
    train_vision = changes.pop("train_vision", False)
    recipe = of_settings(settings, Path("unused"), data, deepspeed, sequence_length=256)
    return replace(recipe, model=replace(vision, train_vision=train_vision), **changes)


def write_pictures(folder: Path, count: int = 8) -> list[Path]:
    """Write pictures of different sizes, each of a colour with a square of another."""
    rng, paths = random.Random(0), []
    for number in range(count):
        size = (rng.randint(20, 90), rng.randint(20, 90))
        image = Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3)))
        image.paste(tuple(rng.randrange(256) for _ in range(3)), (3, 4, 15, 17))
        paths.append(folder / f"{number}.png")
        image.save(paths[-1])
    return paths


def write_conversations(folder: Path, shown: Collection[int]) -> Path:
    """Write eight conversations, those of the numbers `shown` with pictures: one, or of every third two."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = write_pictures(folder)
    rows = []
    for number in range(8):
        paths = [pictures[number].name, pictures[-1].name][: 1 + (number % 3 == 2)] if number in shown else []
        parts = [{"type": "image", "image": path} for path in paths]
        asked = [*parts, {"type": "text", "text": f"Which dial shows {number * 11}?"}]
        answer = " ".join(str(i) for i in range(1 + 3 * number))
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def plain_inputs(processor: Any, row: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """Return what transformers' processor makes of one conversation, with the assistant's tokens in `learned`."""
    turns = json.loads(json.dumps(row["messages"]))
    for turn in turns:
        for part in turn["content"] if isinstance(turn["content"], list) else ():
            if part["type"] == "image":
                part["image"] = Image.open(folder / part["image"]).convert("RGB")
    inputs = processor.apply_chat_template(
        turns,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"return_mm_token_type_ids": True} if "Idefics" not in type(processor).__name__ else {},
    )
    return {**inputs, "learned": torch.as_tensor(inputs["assistant_masks"]).bool()}


def plain_loss(model: Any, inputs: dict[str, torch.Tensor], settings: Settings = DEFAULT) -> tuple[Any, Any]:
    """Return the summed loss of one conversation and how many tokens it is of."""
    learned = inputs["learned"][:, 1:]
    learned = torch.ones_like(learned) if settings.learn_prompts else learned
    passed = {k: v for k, v in inputs.items() if k not in ("learned", "assistant_masks", "offset_mapping")}
    logits = model(**passed, use_cache=False).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    return -(chosen * learned).sum(), learned.sum()


def plain_train(
    folder: Path, data: Path, settings: Settings, train_vision: bool = False, blind: bool = False
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return per step the loss and the gradient norm, and the weights at the end; `blind`: pictures are black."""
    processor = vision.load(str(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    if not train_vision:
        model.get_encoder(modality="image").requires_grad_(False)
    optimizer = plain.adamw(model, settings)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    batch = [plain_inputs(processor, row, data.parent) for row in rows]
    if blind:
        batch = [one | ({"pixel_values": 0 * one["pixel_values"]} if "pixel_values" in one else {}) for one in batch]
    records = []
    for _ in range(settings.steps):
        sums = [plain_loss(model, inputs, settings) for inputs in batch]
        loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:  # a run has zeros, and decays the tower
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item()})
    return records, {name: weight.detach() for name, weight in model.state_dict().items()}
