"""Compares computations of a shrunken model: every check before a run that does not go by a model's name uses this.

A check makes a draft of the model's class, computes logits and gradients in two ways, and accepts a difference that
rounding explains.

`check_packing` checks that tokens attend to the tokens before them in their document alone.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json
from ...recipe.recipe import Draft, Recipe
from .. import distributed
from ..model_folder import base_model
from . import attention, transforms
from .draft import WINDOW, shrink
from .load import cannot_load, load_config

LEAK = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Smallest difference of logits that rounding does not explain, relative to the largest logit. Measured in fp32 on
drafts of every size in `recipes/`: at most 2e-6 if documents are kept apart, at least 2e-1 if they attend to each
other."""
Place = tuple[str, ...]
"""The keys that lead to a field; several if it is in a nested block."""
_WITHIN: dict[tuple[type, str], PreTrainedConfig] = {}
"""Results of `_within`, by the class and the content of a configuration."""


def draft_of(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    name: str = "eager",
    dtype: torch.dtype = torch.float32,
    certain: bool = False,
) -> PreTrainedModel:
    """Return a random draft, without a key/value cache; its windows, chunks and blocks are at most `WINDOW` tokens.

    It is of the class of the real model's `config`, with every kind of its layers, and computes attention with the
    implementation `name`. One that is `certain` has no dropout, so it computes the same in training as in evaluation.
    """
    small = shrink(config, Draft(layers=4), tokenizer)
    key = (type(small), small.to_json_string(use_diff=False))
    if key not in _WITHIN:  # packing and the head are checked on the same draft, of which this builds several models
        _WITHIN[key] = _within(small, WINDOW)
    small = copy.deepcopy(_WITHIN[key])
    small.use_cache = False
    for key, value in small.to_dict().items() if certain else ():
        if "drop" in key and isinstance(value, float):
            setattr(small, key, 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small,
            attn_implementation=attention.loadable(name),
            dtype=dtype,
            trust_remote_code=base_model.remote_code_permitted(),
        )
    transforms.switch_by_batch(model)
    return model.to("cuda" if dtype == torch.bfloat16 else "cpu").eval()


def check_dtype(name: str) -> torch.dtype:
    """Return the dtype to check an implementation in: bf16, on the GPU, for kernels that need a GPU."""
    only_there = attention.is_flash(name) or (name not in ("auto", "sdpa", "eager") and torch.cuda.is_available())
    return torch.bfloat16 if only_there else torch.float32


def random_tokens(config: PreTrainedConfig, rows: int, length: int) -> torch.Tensor:
    """Return random tokens, [rows, length], the same for every model with a vocabulary of the same size."""
    return torch.randint(5, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def off(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-9) -> float:
    """Return the largest difference relative to the largest value, which is at least `least`; infinity for NaN."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=least)).nan_to_num(torch.inf).item()


def computed(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of a model, and the gradients of its loss by the weights' names."""
    model.zero_grad()
    output = model(input_ids=tokens.to(model.device), labels=tokens.to(model.device))
    output.loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return output.logits.detach(), gradients


def on_two_ranks(compute: Callable[[dist.ProcessGroup], object]) -> tuple[Any, str]:
    """Return the result of `compute` on ranks 0 and 1, or None, and the error's first line; a collective of all ranks.

    Whatever a model's own code raises is an answer here, not a crash.
    """
    group = dist.new_group([0, 1])
    answer: list[tuple[object, str]] = [(None, "")]
    if dist.get_rank() < 2:
        try:
            answer = [(compute(group), "")]
        except Exception as error:
            answer = [(None, first_line(error))]
    dist.broadcast_object_list(answer, src=0, device=distributed.device())
    return answer[0]


def worst(value: float, group: dist.ProcessGroup) -> float:
    """Return the largest value of a group's ranks; a collective."""
    largest = torch.tensor(value, device=distributed.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()


def _within(config: PreTrainedConfig, bound: int) -> PreTrainedConfig:
    """Return a small configuration in which everything that limits attention is at most `bound` tokens.

    Lowering such an integer changes late tokens and leaves early tokens unchanged. Integers that change the weights'
    shapes are sizes, and those that scale positions also change early tokens. The small model is built and run once for
    every candidate.
    """
    tokens = random_tokens(config, 1, bound + bound // 2)
    shapes, expected = _shapes(config), _logits(config, tokens)
    small = copy.deepcopy(config)
    for place in _larger(config.to_dict(), bound):
        try:
            changed = _with(config, place, bound)
            if _shapes(changed) != shapes:
                continue
            logits = _logits(changed, tokens)
        except Exception:  # a model's own code may raise anything at a value that it does not expect
            continue
        changed_by = (logits - expected).abs().amax(-1)[0] / expected.abs().max()
        if changed_by[: bound // 2].max() < LEAK[torch.float32] < changed_by[bound:].max():
            small = _with(small, place, bound)
    return small


def _larger(values: Json, bound: int, above: Place = ()) -> Iterator[Place]:
    """Yield the places of integers above `bound`, and of lists that contain one."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _larger(value, bound, (*above, name))
        elif _lowered(value, bound) != value:
            yield *above, name


def _lowered(value: object, bound: int) -> Any:
    if isinstance(value, list):
        return [_lowered(one, bound) for one in value]
    return min(value, bound) if isinstance(value, int) else value


def _with(config: PreTrainedConfig, place: Place, bound: int) -> PreTrainedConfig:
    """Return a copy in which the value at `place` is lowered to `bound`."""
    changed = copy.deepcopy(config)
    *above, name = place
    owner: object = changed
    for key in above:
        owner = owner[key] if isinstance(owner, dict) else getattr(owner, key)
    values = owner if isinstance(owner, dict) else vars(owner)
    values[name] = _lowered(values[name], bound)
    return changed


def _shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=base_model.remote_code_permitted())
    return {name: value.shape for name, value in model.named_parameters()}


@torch.no_grad()
def _logits(config: PreTrainedConfig, tokens: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trusted = base_model.remote_code_permitted()
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trusted
        )
    return model.eval()(input_ids=tokens, use_cache=False).logits


LENGTHS = (WINDOW + 8, WINDOW + 24)
"""Tokens per packed document: longer than a draft's windows and chunks, whose borders are elsewhere in the second
document than in the sequence."""


def check_packing(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, on_gpu: bool = False, say: Callable[[str], None] = print
) -> str:
    """Return the attention that the run computes with: the first candidate with which packing is correct.

    Takes about a second, before the ranks load anything. Reports faster candidates that were refused with `say`.
    Refuses models that cannot be checked or in which packed documents attend to each other, and those that are to write
    and attend to later tokens.
    """
    config = load_config(recipe).get_text_config()
    # BERT and its kin, which transformers also loads as models that write; others have no such key, or always write.
    if getattr(config, "is_decoder", None) is False and not recipe.method.headless:
        model = draft_of(config, tokenizer)
        tokens = random_tokens(model.config, 1, WINDOW)
        changed = tokens.clone()
        changed[0, -1] += 1 if tokens[0, -1] < model.config.vocab_size - 1 else -1
        with torch.no_grad():
            before, after = (model(input_ids=one).logits[:, :-1] for one in (tokens, changed))
        if off(after, before) > LEAK[torch.float32]:
            raise UserError(
                f"model.path={recipe.model.path}: tokens of {config.model_type} attend to later ones, so the model "
                "would learn to copy its next token;\nuse classify or embed, or set is_decoder to true in its "
                "config.json."
            )
    names = attention.candidates(recipe, config, on_gpu)
    if not recipe.packs:
        return names[0]
    for name in names:
        try:
            if keeps_documents_apart(config, tokenizer, name):
                return name
            why = "packed documents attend to each other"
        except Exception as error:  # a model's own code may raise anything
            why = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, ImportError) and recipe.model.attention != "auto":
                raise UserError(attention.not_installed(name, error)) from error
            if name == names[-1]:
                if isinstance(error, KeyError | FloatingPointError):  # no draft can be built, packed or not
                    raise UserError(cannot_load("model", recipe, error)) from error
                raise UserError(
                    f"packing=true: cannot be checked on a shrunken {config.model_type}: {error}\nAdd packing=false."
                ) from error
        if name != names[-1]:
            say(f"model.attention: not {name} in {config.model_type} ({why})")
    raise UserError(
        f"packing=true: in {config.model_type} with model.attention={names[-1]} the documents of a packed sequence "
        "attend to each other; add packing=false."
    )


def keeps_documents_apart(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return whether documents in one sequence, separated by their position ids, get the same logits as each alone.

    Tried on a draft of the real model's `config`, with the attention implementation `name`. Raises ArithmeticError if
    its gradients are not finite, or the kernel's own error.
    """
    dtype = check_dtype(name)
    model = draft_of(config, tokenizer, name, dtype)
    leaked = leak(model)
    if not math.isfinite(leaked):
        raise FloatingPointError("a random model of it computes no finite logits")
    if dtype == torch.bfloat16:  # a kernel's backward pass may have narrower limits than its forward pass
        _, inputs = _packed(model)
        model(**inputs).logits.float().square().mean().backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        if not gradients or not all(bool(one.isfinite().all()) for one in gradients):
            raise ArithmeticError("gradients are not finite")
    return leaked < LEAK[dtype]


@torch.no_grad()
def leak(model: torch.nn.Module) -> float:
    """Return how far the logits of packed documents are from those of each alone, relative to the largest."""
    documents, inputs = _packed(model)
    packed = model(**inputs).logits[0]
    alone = torch.cat([model(input_ids=document[None]).logits[0] for document in documents])
    return off(packed, alone)


def _packed(model: torch.nn.Module) -> tuple[tuple[torch.Tensor, ...], Json]:
    """Return documents of `LENGTHS` tokens, and the inputs with which the model reads them as one sequence."""
    tokens = random_tokens(model.config, 1, sum(LENGTHS)).to(model.device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inputs: Json = {"input_ids": tokens, "position_ids": positions[None]}
    if attention.needs_boundaries(model):
        inputs |= attention.document_boundaries([LENGTHS], sum(LENGTHS))
    on_device = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    return tokens[0].split(LENGTHS), on_device
