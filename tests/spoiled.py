"""A model and data with one row whose loss is NaN: a token that occurs in no other row has a NaN embedding."""

import json
from pathlib import Path

SPOILT = "§"


def spoil_model(source: Path, folder: Path) -> Path:
    """Write the model with a head of its own, since a tied NaN would reach every row's logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    config = model.config
    config.tie_word_embeddings = False
    model = type(model)(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[spoilt_tokens(tokenizer)] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spoilt_tokens(tokenizer) -> list[int]:
    return tokenizer(SPOILT, add_special_tokens=False)["input_ids"]


def spoil_data(source: Path, path: Path, number: int) -> Path:
    """Write the data with a row, by its number, that contains the token."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    rows[number]["messages"][0]["content"] += f" {SPOILT}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def leave_out(source: Path, path: Path, number: int) -> Path:
    """Write the data with the next row in the place of one."""
    lines = source.read_text().splitlines()
    lines[number] = lines[(number + 1) % len(lines)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
