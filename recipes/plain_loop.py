"""Supervised fine-tuning with DeepSpeed in one flat file: no trainer, no project imports. Copy it and change it.

    deepspeed --no_local_rank --num_gpus 2 recipes/plain_loop.py MODEL data.jsonl OUTPUT
    DS_ACCELERATOR=cpu deepspeed --no_local_rank --num_gpus 2 recipes/plain_loop.py ...     # without a GPU

MODEL is a Hugging Face model with a chat template that marks the assistant's tokens; every line of data.jsonl is
{"messages": [{"role": ..., "content": ...}, ...]}. OUTPUT becomes a folder that `from_pretrained` loads.
A run whose loss is not finite, or that leaves the weights unchanged, ends with exit status 1 and writes no OUTPUT.
`scripts/launch.py` has what this file lacks: evaluation, resume, adapters, tracking, checks.
"""

import argparse
import json
import math
import os
import resource
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig


def options():
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("output")
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--adam-epsilon", type=float, default=1e-8)
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--no-pack", action="store_true")
    parsed = parser.parse_args()
    for name in ("steps", "micro_batch", "accumulation", "length", "lr", "log_every"):
        if not 0 < getattr(parsed, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(parsed, name)}: must be above 0 and finite")
    return parsed


def documents(path, tokenizer, length):
    """Return (tokens, labels) per conversation; -100 keeps a token out of the loss."""
    # Not splitlines(), which also splits at U+2028, a character that JSON allows inside strings.
    lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    kept, long, unmarked = [], 0, 0
    for line in lines:
        messages = json.loads(line)["messages"]
        chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = chat["input_ids"], chat["assistant_masks"]
        # The first token has no label, since no earlier token could predict it.
        labels = [-100] + [t if m else -100 for t, m in zip(tokens[1:], mask[1:], strict=True)]
        if len(tokens) > length:
            long += 1
        elif not any(mask[1:]):
            unmarked += 1
        else:
            kept.append((tokens, labels))
    if not kept:
        raise SystemExit(
            f"{path}: nothing to learn: {long} of {len(lines)} conversations are longer than --length {length}, and in "
            f"{unmarked} the chat template of MODEL marks no assistant's tokens. If it never does, put "
            "{% generation %} ... {% endgeneration %} around the assistant's turn in its chat_template.jinja, or use "
            "scripts/launch.py, which finds them."
        )
    if dist.get_rank() == 0 and (long or unmarked):
        print(
            f"warning: {long + unmarked} of {len(lines)} conversations are dropped: {long} are longer than --length "
            f"{length}, and {unmarked} have no assistant's tokens"
        )
    return kept


def packed(documents, length):
    """Return sequences, each a list of documents that fit into `length` together (first fit, longest first)."""
    sequences: list[list] = []
    room: list[int] = []
    for document in sorted(documents, key=lambda d: -len(d[0])):
        size = len(document[0])
        index = next((i for i, free in enumerate(room) if free >= size), None)
        if index is None:
            sequences.append([])
            room.append(length)
            index = len(sequences) - 1
        sequences[index].append(document)
        room[index] -= size
    return sequences


def collate(sequences, pad, device):
    """Return tensors [sequences, width]. Positions restart at each document, so that transformers keeps them apart."""
    width = -(-max(sum(len(tokens) for tokens, _ in documents) for documents in sequences) // 8) * 8
    ids = torch.full((len(sequences), width), pad)
    labels = torch.full((len(sequences), width), -100)
    positions = torch.zeros((len(sequences), width), dtype=torch.long)
    for i, documents in enumerate(sequences):
        at = 0
        for tokens, targets in documents:
            end = at + len(tokens)
            ids[i, at:end], labels[i, at:end] = torch.tensor(tokens), torch.tensor(targets)
            positions[i, at:] = torch.arange(width - at)
            at = end
    return {"input_ids": ids.to(device), "labels": labels.to(device), "position_ids": positions.to(device)}


def main():
    """Train."""
    o = options()
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(deepspeed.accelerator.get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))
    config = {
        "train_micro_batch_size_per_gpu": o.micro_batch,
        "gradient_accumulation_steps": o.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": o.dtype == "bf16"},
        "zero_optimization": {"stage": o.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
    }
    # While this object exists, from_pretrained shards the weights as it reads them (ZeRO-3).
    live = HfDeepSpeedConfig(config)  # noqa: F841

    tokenizer = AutoTokenizer.from_pretrained(o.model)
    dtype = torch.bfloat16 if o.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=dtype, use_safetensors=True)
    model.config.use_cache = False
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and not n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, eps=o.adam_epsilon, fused=True)
    warmup = max(1, o.steps // 20)

    def rate(step):
        if o.schedule == "constant":
            return 1.0
        rising = (step + 1) / warmup
        return min(rising, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / max(1, o.steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)

    kept = documents(o.data, tokenizer, o.length)
    sequences = [[document] for document in kept] if o.no_pack else packed(kept, o.length)
    batch = o.micro_batch * o.accumulation * world
    if len(sequences) < batch:
        raise SystemExit(
            f"{o.data}: {len(sequences)} sequences, and a step takes {batch}: lower --micro-batch or --length."
        )

    def sample():
        """Return a sample of the weights: this rank's part of those that ZeRO-3 shards."""
        return [getattr(p, "ds_tensor", p).detach().flatten()[:1024].clone() for p in model.parameters()]

    before = sample()
    order = torch.Generator().manual_seed(0)
    queue: list[int] = []
    seen, start = 0, time.perf_counter()
    for step in range(1, o.steps + 1):
        if len(queue) < batch:
            queue = torch.randperm(len(sequences), generator=order).tolist()
        chosen, queue = [sequences[i] for i in queue[:batch]], queue[batch:]
        mine = chosen[rank::world]
        micro = [collate(mine[i :: o.accumulation], tokenizer.pad_token_id or 0, device) for i in range(o.accumulation)]
        # Every labelled token of the global batch has the same weight, on whichever rank; DeepSpeed averages over
        # ranks and accumulation steps, so both are multiplied back in.
        labelled = sum((m["labels"] != -100).sum() for m in micro)
        dist.all_reduce(labelled)
        total = torch.zeros((), device=device)
        for m in micro:
            loss = engine(**m, num_items_in_batch=labelled).loss
            engine.backward(loss * world * o.accumulation)
            engine.step()
            total += loss.detach()
        seen += sum(len(tokens) for documents in chosen for tokens, _ in documents)
        if step % o.log_every == 0 or step == o.steps:
            dist.all_reduce(total)
            norm = engine.get_global_grad_norm()
            if not total.isfinite() or not math.isfinite(norm or 0):  # DeepSpeed skips such an update and goes on
                raise SystemExit(
                    f"step {step}: the loss is {total.item()}, the gradient's norm {norm}: lower --lr {o.lr}, or check "
                    f"{o.data}."
                )
            if rank == 0:
                print(json.dumps({
                    "step": step,
                    "loss": total.item(),
                    "grad_norm": norm and float(norm),
                    "tokens": seen,
                    "seconds": time.perf_counter() - start,
                    "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                }), flush=True)  # fmt: skip

    moved = torch.tensor(float(any(not a.equal(b) for a, b in zip(sample(), before, strict=True))), device=device)
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    if not moved:
        raise SystemExit(f"the weights have not changed after {o.steps} steps: --lr {o.lr} is too small.")

    # Under ZeRO-3 every rank takes part in gathering the weights; rank 0 gets them.
    state = engine._zero3_consolidated_16bit_state_dict() if o.zero_stage == 3 else engine.module.state_dict()
    if rank == 0:
        model.save_pretrained(o.output, state_dict=state)
        tokenizer.save_pretrained(o.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
