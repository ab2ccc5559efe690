"""Make the tiny teacher: fine-tune the tiny base model on the chat task, on a CPU.

    python -m recipes.samples.teach                            # about 6 minutes, 2 threads
    python -m recipes.samples.teach --epochs 0.1 --output /tmp/rough

It sees `extract/train.jsonl` twice and learns the assistant's words only. The loop is `pretrain.py`'s own, on the
tokens of conversations.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from .pretrain import HERE, save, schedule

BATCH = 8
"""Conversations in a step."""


def conversations(tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of every training conversation, and its labels: the assistant's tokens."""
    lines = (HERE / "extract" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        chat = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(chat["input_ids"], chat["assistant_masks"], strict=True)
        found.append((chat["input_ids"], [token if said else -100 for token, said in pairs]))
    return found


def batch(chosen: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Return the model's inputs; padding comes last, so causal attention needs no mask for it."""
    width = max(len(tokens) for tokens, _ in chosen)
    inputs = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in chosen])
    labels = torch.tensor([given + [-100] * (width - len(given)) for _, given in chosen])
    return {"input_ids": inputs, "labels": labels}


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, epochs: float, rate: float, seed: int) -> float:
    """Fine-tune the model; return the mean loss of the last fiftieth of the steps."""
    rng, examples = random.Random(seed), conversations(tokenizer)
    order: list[int] = []
    steps = int(epochs * len(examples)) // BATCH
    while len(order) < steps * BATCH:
        order += rng.sample(range(len(examples)), len(examples))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    losses = []
    model.train()
    for step in range(steps):
        chosen = [examples[number] for number in order[step * BATCH : (step + 1) * BATCH]]
        loss = model(**batch(chosen, tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {sum(losses[-100:]) / 100:.4f}", flush=True)
    last = losses[-max(1, steps // 50) :]
    return sum(last) / len(last)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, fine-tune the base model, and save it in bfloat16."""
    parser = argparse.ArgumentParser(
        description="Fine-tune the tiny base model on the chat task: the teacher of `tiny distill`.",
        epilog="Example: python -m recipes.samples.teach --epochs 0.1 --output /tmp/rough",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "tiny_teacher",
        help="folder to write (default: tiny_teacher beside this script)",
    )
    parser.add_argument("--epochs", type=float, default=2.0, help="passes over the data (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at the peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2027, help="of the order of the data (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny_model")
    model = Qwen3ForCausalLM.from_pretrained(HERE / "tiny_model", dtype=torch.float32)
    loss = teach(model, tokenizer, options.epochs, options.learning_rate, options.seed)
    save(model, tokenizer, options.output)
    print(f"final loss {loss:.4f}; saved in {options.output}")


if __name__ == "__main__":
    main()
