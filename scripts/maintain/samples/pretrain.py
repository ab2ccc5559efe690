"""Makes the tiny base model: trains its tokenizer, then pre-trains the model from scratch on raw text, on a CPU.

    python -m scripts.maintain.samples.pretrain --output first                          # about 18 minutes, 2 threads
    python -m scripts.maintain.samples.pretrain --continue-from first --output second   # about 11 minutes
    python -m scripts.maintain.samples.pretrain --continue-from second --notices 48000 --seed 2026   # about 15 minutes
    python -m scripts.maintain.samples.pretrain --output /tmp/rough --documents 2000 --threads 8

The text is `text/train.jsonl`, followed by more documents of the same kinds from another seed, each used once. It does
not contain held-out persons. The loop is plain PyTorch, for readers: AdamW, warm-up, cosine, one document per sequence.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deepspeed_recipes.recipe.project import SAMPLES

from . import corpus, world

BOS, PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|bos|>",
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
# Enough for whole given names and halves of family names; with more, rare whole names become tokens.
VOCABULARY = 1152
CONTEXT = 1024
# Only the text between the generation marks, the answer and its end of turn, is the assistant's.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}"
    "{%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}"
    "{%- elif message['role'] in ('user', 'system') %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{%- else %}"
    "{{- raise_exception('role must be system, user or assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def committed_text() -> list[str]:
    """Return the documents of text/train.jsonl."""
    lines = (SAMPLES / "text" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


# A word, a digit, a blank, a run of punctuation, other white space. The blank is a token of its own, so that a word is
# the same token everywhere: copying " Lars" to "Lars" is then copying, not a mapping to be learned.
PIECES = Regex(r"\p{L}+|\p{N}| |[^\s\p{L}\p{N}]+|\s")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which every digit is a token, so that numbers are read digit by digit."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # Raw text begins with <|bos|>, as chats do by their template.
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Make a Qwen3 of 3.0 M parameters; its heads and layers divide by 2 for tensor and pipeline layouts."""
    tokens = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.03,
        use_cache=True,
        **tokens,
    )
    model = Qwen3ForCausalLM(config)
    # GPT-2's scaling: at first the residual stream is mostly the token itself, which is what copying needs.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data /= math.sqrt(2 * config.num_hidden_layers)
        layer.mlp.down_proj.weight.data /= math.sqrt(2 * config.num_hidden_layers)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=128, **tokens)
    return model


def documents(count: int, seed: int) -> Iterator[str]:
    """Yield the committed documents, then new ones, up to `count` in total."""
    texts = committed_text()[:count]
    yield from texts
    rng = random.Random(f"{seed}/pretrain")
    for _ in range(count - len(texts)):
        yield corpus.document(rng)


def primer(count: int, seed: int) -> Iterator[str]:
    """Yield the jottings that come first: in short documents, copying is learned from far fewer tokens."""
    rng = random.Random(f"{seed}/primer")
    for _ in range(count):
        yield corpus.jotting(rng, None)


def notices(count: int, seed: int) -> Iterator[str]:
    """Yield the notices of the later rounds, each with one record, so that only the mapping is to be learned."""
    rng = random.Random(f"{seed}/notices")
    for _ in range(count):
        text, facts = world.notice(rng, None)
        yield f"{text}\n{rng.choice((corpus.settings, corpus.tags))(facts)}"


def batches(
    tokenizer: PreTrainedTokenizerFast, texts: Iterator[str], tokens_per_batch: int, seed: int
) -> list[list[list[int]]]:
    """Return batches of token lists, each document whole, with others of similar length to save padding."""
    rows = [[*tokens, tokenizer.eos_token_id] for tokens in tokenizer(list(texts))["input_ids"]]
    rng = random.Random(seed)
    rng.shuffle(rows)
    result = []
    for start in range(0, len(rows), 1024):
        pool, cut = sorted(rows[start : start + 1024], key=len, reverse=True), []
        while pool:
            size = max(1, tokens_per_batch // len(pool[0]))
            cut.append(pool[:size])
            pool = pool[size:]
        rng.shuffle(cut)
        result += cut
    return result


def padded(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and labels; padding comes last, so causal attention needs no mask for it."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    return tokens, tokens.masked_fill(tokens == pad, -100)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm up over 5 % of the steps, then a cosine down to 5 %."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2


def pretrain(
    model: Qwen3ForCausalLM, data: list[list[list[int]]], learning_rate: float, newline: int
) -> tuple[float, float]:
    """Train on every batch once; return the mean losses (see `losses_of`) of the last fiftieth of the steps."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, len(data)))
    losses, seen, start = [], 0, time.perf_counter()
    model.train()
    for step, rows in enumerate(data, start=1):
        tokens, labels = padded(rows, model.config.pad_token_id)
        loss, of_records = losses_of(model(input_ids=tokens).logits, labels, newline)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append((loss.item(), of_records.item()))
        seen += sum(len(row) for row in rows)
        if step % 50 == 0 or step == len(data):
            minutes = (time.perf_counter() - start) / 60
            recent, copied = mean(losses[-50:])
            print(
                f"step {step}/{len(data)}  loss {recent:.4f}  of records {copied:.4f}  "
                f"tokens {seen}  {minutes:.1f} min",
                flush=True,
            )
    return mean(losses[-max(1, len(losses) // 50) :])


def mean(losses: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the means of the first and of the second numbers."""
    first, second = zip(*losses, strict=True)
    return sum(first) / len(first), sum(second) / len(second)


def losses_of(logits: torch.Tensor, labels: torch.Tensor, newline: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss per token, and that of the tokens after a document's first line.

    The first line is mostly random (who ordered what?); the rest follows from it. So the second number
    goes towards zero as the model learns to copy and to normalise, while the first stops at the entropy of the text.
    """
    each = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    kept = labels[:, 1:] != -100
    follows = (labels[:, :-1] == newline).cumsum(1).bool() & kept
    each = each.view_as(kept)
    return each[kept].mean(), each[follows].sum().detach() / follows.sum().clamp(min=1)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Save both; weights are stored as bfloat16 to halve the file, and load as float32 by default."""
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    path = output / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "float32"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train the tokenizer and the model, and save both."""
    parser = argparse.ArgumentParser(
        description="Train the tiny base model's tokenizer and pre-train the model on raw text.",
        epilog="Example: python -m scripts.maintain.samples.pretrain --output /tmp/rough --documents 2000",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLES / "tiny_model",
        help="folder to write (default: tiny_model beside this script)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=36_000,
        help="documents to read, after a third as many jottings (default: %(default)s)",
    )
    parser.add_argument("--batch-tokens", type=int, default=1280, help="tokens in a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3, help="at the peak (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=2025, help="of the text, its order and the weights (default: %(default)s)"
    )
    parser.add_argument("--notices", type=int, default=28_000, help="notices of a later round (default: %(default)s)")
    parser.add_argument(
        "--continue-from", type=Path, metavar="DIR", help="a later round, on the model that the one before saved"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    if options.continue_from:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.continue_from)
        model = Qwen3ForCausalLM.from_pretrained(options.continue_from, dtype=torch.float32)
        texts, learning_rate = [notices(options.notices, options.seed)], 0.8 * options.learning_rate
    else:
        tokenizer = train_tokenizer(committed_text())
        model = new_model(tokenizer)
        texts = [primer(options.documents // 3, options.seed), documents(options.documents, options.seed)]
        learning_rate = options.learning_rate
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    data = [batch for part in texts for batch in batches(tokenizer, part, options.batch_tokens, options.seed)]
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    loss, of_records = pretrain(model, data, learning_rate, newline)
    save(model, tokenizer, options.output)
    print(f"final loss {loss:.4f}, of records {of_records:.4f}; saved in {options.output}")


if __name__ == "__main__":
    main()
