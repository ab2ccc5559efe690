"""The reference of distillation: plain PyTorch, one process, whole logits of both models, in fp32."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe.methods import Distill
from deepspeed_recipes.training.methods.rollouts import hooks
from deepspeed_recipes.training.model import lora as adapters
from tests.parity import plain

SEED = 42
"""The recipe's, from which follows what the student writes, and when."""


@dataclass(frozen=True)
class Mistakes:
    """What a test must notice."""

    swapped: bool = False
    """The two distributions of a Kullback-Leibler divergence are exchanged."""
    unsquared: bool = False
    """The divergence is not multiplied by the square of the temperature."""
    beta_of_student: bool = False
    """Beta is taken for the student's weight in the mixture."""
    halved: bool = False
    """The gradients of two ranks are averaged although the loss is divided by the tokens of both: GKDTrainer's."""
    learn_prompts: bool = False
    """The user's words are in the loss."""
    never_writes: bool = False
    """The student learns from the data's answers only."""
    stale: bool = False
    """The student's answers are those of the model before training."""


NONE = Mistakes()


def train(
    folder: Path,
    teacher: Path,
    data: Path,
    settings: plain.Settings,
    distill: Distill,
    mistakes: Mistakes = NONE,
    prepare: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return per step the loss, its parts and the gradient norm before clipping, and the final weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = prepare(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    how = {} if distill.teacher_quantization == "none" else {"quantization_config": adapters.nf4(torch.float32)}
    frozen = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32, **how)
    frozen.train(bool(how))  # no dropout in it; in evaluation bitsandbytes multiplies in bf16 on some CPUs
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in trained if "norm" not in name], "weight_decay": settings.weight_decay},
        {"params": [one for name, one in trained if "norm" in name], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, eps=settings.epsilon)
    shown = plain.Settings(learn_prompts=mistakes.learn_prompts)
    conversations = plain.examples(data, tokenizer, shown)
    records: list[dict[str, float]] = []
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(settings.steps):
        writes = random.Random(f"{SEED} {step}").random() < distill.on_policy and not mistakes.never_writes
        if writes and not (own and mistakes.stale):
            numbers = hooks.seeds_of(SEED, step, range(len(conversations)))
            own = [_written(model, *one, seed, distill) for one, seed in zip(conversations, numbers, strict=True)]
        examples = own if writes else conversations
        found = [_of_tokens(model, frozen, *example, distill, mistakes) for example in examples]
        apart, said = (torch.cat(parts).mean() for parts in zip(*found, strict=True))
        squared = 1.0 if mistakes.unsquared else distill.temperature**2
        loss = (1 - distill.alpha) * squared * apart + distill.alpha * said
        loss = loss / 2 if mistakes.halved else loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        numbers = {"loss": loss, "grad_norm": norm, "divergence": apart, "cross_entropy": said}
        records.append({name: number.item() for name, number in numbers.items()})
    return records, model.state_dict()


@torch.no_grad()
def _written(model, tokens, learned, seed, distill):
    """Return the model's own answer to an example's prompt, sampled token by token with one answer's random numbers."""
    generator = torch.Generator().manual_seed(seed)
    prompt = int(learned[0].int().argmax())
    tokens, end = tokens[:, :prompt], model.generation_config.eos_token_id
    for _ in range(distill.max_new_tokens):
        logits = model(input_ids=tokens, use_cache=False).logits[0, -1]
        noise = torch.empty_like(logits).exponential_(generator=generator)
        tokens = torch.cat([tokens, (logits - noise.log()).argmax().view(1, 1)], dim=1)
        if tokens[0, -1] == end:
            break
    return tokens, torch.arange(tokens.shape[1])[None] >= prompt


def _of_tokens(model, frozen, tokens, learned, distill, mistakes):
    """Return each learned token's divergence and cross-entropy, [tokens] each."""
    learned = learned[:, 1:]
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1][learned]
    with torch.no_grad():
        wanted = frozen(input_ids=tokens, use_cache=False).logits[:, :-1][learned]
        wanted = wanted[:, : logits.shape[-1]]  # without the padding of its vocabulary
    said = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][learned], reduction="none")
    student, teacher = ((one / distill.temperature).log_softmax(-1) for one in (logits, wanted))
    return _divergence(student, teacher, distill, mistakes), said


def _divergence(student, teacher, distill, mistakes):
    if distill.loss == "jsd":
        beta = 1 - distill.beta if mistakes.beta_of_student else distill.beta
        mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    forward = (distill.loss == "forward_kl") != mistakes.swapped
    return _kl(teacher, student) if forward else _kl(student, teacher)


def _kl(one, other):
    """Return KL(one || other): torch's arguments are the other way round."""
    return kl_div(other, one, log_target=True, reduction="none").sum(-1)
