"""Makes the half-trained model, the starting point for learning from rewards: right in form, but often wrong.

    python -m scripts.maintain.samples.half_train   # seconds; writes samples/half_trained_model

A short supervised fine-tuning of `tiny_model` on the first examples of `extract/train.jsonl`, each used once, in plain
PyTorch. A model that is never right gets no reward, and a model that is nearly always right has nothing left to learn.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from deepspeed_recipes.recipe.project import SAMPLES

from . import pretrain

STEPS, EXAMPLES_PER_STEP, LEARNING_RATE = 30, 16, 1.5e-3


def batches(tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels of chats, [examples, longest]; only the assistant's tokens have labels."""
    lines = (SAMPLES / "extract" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for start in range(0, steps * EXAMPLES_PER_STEP, EXAMPLES_PER_STEP):
        chats = [json.loads(line)["messages"] for line in lines[start : start + EXAMPLES_PER_STEP]]
        found = tokenizer.apply_chat_template(
            chats, padding=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        yield found["input_ids"], found["input_ids"].masked_fill(found["assistant_masks"] == 0, -100)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> float:
    """Train on the batches at a constant rate, and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    model.train()
    loss = torch.tensor(0.0)
    for tokens, labels in batches(tokenizer, steps):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train the model, and save it."""
    parser = argparse.ArgumentParser(description="Make the model from which learning from rewards begins.")
    parser.add_argument("--output", type=Path, default=SAMPLES / "half_trained_model", help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 16 examples each (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # sums in the same order everywhere
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SAMPLES / "tiny_model")
    model = Qwen3ForCausalLM.from_pretrained(SAMPLES / "tiny_model", dtype=torch.float32)
    loss = train(model, tokenizer, options.steps)
    pretrain.save(model, tokenizer, options.output)
    print(f"loss {loss:.4f} after {options.steps} steps; saved in {options.output}")


if __name__ == "__main__":
    main()
