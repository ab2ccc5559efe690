"""A model and data with one example whose loss is NaN: a token that no other example has gets a NaN embedding."""

import json
from pathlib import Path

NAN_TEXT = "§"


def write_nan_model(source: Path, folder: Path) -> Path:
    """Write the model with an untied head, since a tied NaN would reach the logits of every example."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    config = model.config
    config.tie_word_embeddings = False
    model = type(model)(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[nan_tokens(tokenizer)] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def nan_tokens(tokenizer) -> list[int]:
    return tokenizer(NAN_TEXT, add_special_tokens=False)["input_ids"]


def write_nan_data(source: Path, path: Path, number: int) -> Path:
    """Write the data with the token in the example of this number."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    rows[number]["messages"][0]["content"] += f" {NAN_TEXT}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def leave_out(source: Path, path: Path, number: int) -> Path:
    """Write the data with one example replaced by the next."""
    lines = source.read_text().splitlines()
    lines[number] = lines[(number + 1) % len(lines)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
