"""Makes the vision-language base model: trains its tokenizer, then pre-trains tower and language model, on a CPU.

    python -m scripts.maintain.samples.sight.pretrain --output first
    python -m scripts.maintain.samples.sight.pretrain --continue-from first --output second   # again, not the tower

The tower first learns the labels of its cells; then the whole model learns from captions of the same images, and from
chats about the kind of image. Questions of the fine-tuning task, which ask for a single reading, are not included. The
loop is plain PyTorch, for readers: AdamW, warm-up, cosine.
"""

import argparse
import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from . import ask, labels
from .draw import SIZE, Picture, draw

BOS, PAD, END, SYSTEM, USER, ASSISTANT, IMAGE = SPECIAL = (
    "<|bos|>",
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|image|>",
)
VOCABULARY = 448
CONTEXT = 512
PATCH = 8
PLACES = (SIZE // PATCH) ** 2
"""Tokens per image."""
# Only the text between the generation marks, the answer and its end of turn, is the assistant's.
CHAT_TEMPLATE = (
    "{%- macro said(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- else -%}{%- for part in content -%}"
    "{{- '<|image|>' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}"
    "{%- generation %}{{- said(message['content']) + eos_token }}{%- endgeneration %}"
    "{%- elif message['role'] in ('user', 'system') %}"
    "{{- '<|' + message['role'] + '|>' + said(message['content']) + eos_token }}"
    "{%- else %}"
    "{{- raise_exception('role must be system, user or assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# A word, a digit, a blank, a run of punctuation, other white space.
PIECES = Regex(r"\p{L}+|\p{N}| |[^\s\p{L}\p{N}]+|\s")


def said(pictures: list[Picture], rng: random.Random) -> str:
    """Return the text about one or two images: captions, or sometimes a chat about a single image."""
    first = ask.caption(pictures[0], rng)
    if len(pictures) == 2:
        return f"{BOS}{IMAGE}{IMAGE}{first}\n{ask.caption(pictures[1], rng)}{END}"
    if rng.random() < 0.7:
        return f"{BOS}{IMAGE}{first}{END}"
    asked, answer = ask.first_chat(pictures[0], rng)
    return f"{BOS}{USER}{IMAGE}{asked}{END}{ASSISTANT}{answer}{END}"


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on captions and questions, in which every digit is a token."""
    rng = random.Random("tokenizer")
    texts = [said([ask.any_picture(rng)], rng) for _ in range(4000)]
    texts += [f"{asked} {answer}" for _, asked, answer in (ask.question(rng) for _ in range(4000))]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    for token in SPECIAL:
        texts = [text.replace(token, "\n") for text in texts]
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        extra_special_tokens={"image_token": IMAGE},
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Make a LLaVA of half a million parameters: a SigLIP tower, two linear layers and a Qwen3."""
    tokens = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    vision = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.03,
        **tokens,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=PLACES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=64, **tokens)
    return model


def drawn(count: int, rng: random.Random) -> tuple[list[Picture], torch.Tensor]:
    """Return images and the processor's pixel values for them, [images, 3, side, side]."""
    pictures = [ask.any_picture(rng) for _ in range(count)]
    pixels = np.stack([np.asarray(draw(one, rng)) for one in pictures])
    return pictures, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def batches(
    tokenizer: PreTrainedTokenizerFast, pool: tuple[list[Picture], torch.Tensor], count: int, size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `count` batches about the images in `pool`; all tokens except those of images and padding have labels."""
    rng, image = random.Random(f"{seed}/batches"), tokenizer.convert_tokens_to_ids(IMAGE)
    pictures, pixels = pool
    for _ in range(count):
        two = rng.random() < 0.1  # together, since each batch is as long as its longest example
        rows, chosen = [], []
        for _ in range(size // (1 + two)):
            which = [rng.randrange(len(pictures)) for _ in range(1 + two)]
            text = said([pictures[one] for one in which], rng).replace(IMAGE, IMAGE * PLACES)
            rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
            chosen += which
        width = max(map(len, rows))
        tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        hidden = (tokens == tokenizer.pad_token_id) | (tokens == image)
        yield {"input_ids": tokens, "labels": tokens.masked_fill(hidden, -100), "pixel_values": pixels[chosen]}


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm up over 3 % of the steps, then a cosine down to 2 %."""
    warm_up = max(1, steps // 33)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.02 + 0.98 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2


def train_tower(
    model: LlavaForConditionalGeneration, pool: tuple[list[Picture], torch.Tensor], steps: int, rate: float, size: int
) -> float:
    """Train the tower to predict the labels of each cell, and return the mean loss of the last steps.

    Like large towers, it is first trained alone, which needs far less computation than training it through the language
    model. The labels are those of `labels.of`; the linear layer that predicts them is discarded.
    """
    named = torch.tensor([labels.of(one) for one in pool[0]])  # [images, kinds of labels, cells]
    head = torch.nn.Linear(model.config.vision_config.hidden_size, sum(labels.CLASSES))
    tower = model.model.vision_tower

    def loss(step: int) -> torch.Tensor:
        chosen = torch.randint(len(named), (size,))
        seen = tower(pool[1][chosen], output_hidden_states=True).hidden_states[-1]
        scores = head(seen).split(labels.CLASSES, dim=-1)
        pairs = zip(scores, named[chosen].unbind(1), strict=True)
        return sum(torch.nn.functional.cross_entropy(one.flatten(0, 1), which.flatten()) for one, which in pairs)

    return trained([*tower.parameters(), *head.parameters()], loss, steps, rate)


def pretrain(
    model: LlavaForConditionalGeneration, data: Iterator[dict[str, torch.Tensor]], steps: int, rate: float
) -> float:
    """Train the whole model on every batch once; return the mean loss of the last steps."""
    model.train()
    return trained(list(model.parameters()), lambda step: model(**next(data)).loss, steps, rate)


def trained(
    parameters: list[torch.nn.Parameter], loss_of: Callable[[int], torch.Tensor], steps: int, rate: float
) -> float:
    """Train for a number of steps, and return the mean loss of the last fiftieth of them."""
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.05},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    losses = []
    for step in range(1, steps + 1):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {sum(losses[-50:]) / 50:.4f}  {time.process_time():.0f} s", flush=True)
    last = losses[-max(1, steps // 50) :]
    return sum(last) / len(last)


def main() -> None:
    """Make the tokenizer and the model, and write them with their processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--continue-from", type=Path, help="a model that this script has written")
    parser.add_argument("--pictures", type=int, default=12000)
    parser.add_argument("--tower-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    start = options.continue_from
    if start:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
        model = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer()
        model = new_model(tokenizer)
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters", flush=True)
    pool = drawn(options.pictures, random.Random(f"{options.seed}/pictures"))
    if not start:
        train_tower(model, pool, options.tower_steps, options.learning_rate, options.batch_size)
        write(model, tokenizer, options.output)
    data = batches(tokenizer, pool, options.steps, options.batch_size, options.seed)
    loss = pretrain(model, data, options.steps, options.learning_rate / 2)
    print(f"loss of the last steps: {loss:.4f}")
    write(model, tokenizer, options.output)


def write(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bf16, with its processor, which resizes images to 48 x 48 pixels, 36 tokens each."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
