"""The teacher: checks its tokenizer, loads it next to the student, and computes its distributions."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from deepspeed import DeepSpeedEngine
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.models.utils import _ForwardRedirection, prepare_deepspeed
from trl.trainer.utils import maybe_gather_lm_head_ctx

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.methods import Distill, Sft
from ....recipe.recipe import Lora, Recipe
from ... import distributed
from ...callbacks import loss_guard
from ...console import say
from ...data import chat_templates
from ...data.collate import Batch
from ...model import load, output_head, probe
from ...model.output_head import Head
from . import divergence, vocabulary

INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Keys of a batch that models read; all others are for the loss."""
_attention: dict[str, str] = {}
"""Attention by a teacher's path: found before ZeRO-3 shards every new model, and used afterwards."""
run_as = _ForwardRedirection()
"""Runs a function as a model's forward pass, within the hooks by which ZeRO-3 gathers weights and reduces gradients."""


def recipe_of(recipe: Recipe) -> Recipe:
    """Return a recipe that loads the teacher; its `lora` only marks that nothing except adapters could be trained."""
    distill = Distill.of(recipe)
    assert distill.teacher is not None
    model = replace(recipe.model, path=distill.teacher, quantization=distill.teacher_quantization, config={})
    plain: Json = {"tiled_loss": False, "tiled_mlp": False, "compile": "off", "gradient_checkpointing": False}
    return replace(recipe, method=Sft(), model=model, lora=Lora(), **plain)


def entries(recipe: Recipe) -> int:
    """Return the number of vocabulary entries in the heads of both models; a server does not report its own."""
    known = (recipe,) if Distill.of(recipe).served else (recipe, recipe_of(recipe))
    return min(load.load_config(one).get_text_config().vocab_size for one in known)


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many entries of the vocabulary both models have; call it before either is loaded."""
    path, ours = recipe_of(recipe).model.path, tokenizer.get_vocab()
    vocabulary.check(path, ours, _tokenizer(recipe).get_vocab())
    if not recipe.draft.enabled:  # the samples' teacher may stand for one with more positions
        vocabulary.check_positions(path, load.load_config(recipe_of(recipe)).to_dict(), recipe)
    if (least := entries(recipe)) < len(ours):
        raise UserError(f"distill.teacher={path}: a head of {least:,} entries for {len(ours):,} tokens.")
    return least


def check_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Find the attention with which a teacher computes; call it before ZeRO-3 shards every new model.

    Refuses logits that cannot be computed in tiles, and a teacher that would mix packed documents.
    """
    check(recipe, tokenizer)
    teacher = recipe_of(recipe)
    config = load.load_config(teacher)
    if why := output_head.difference(config.get_text_config(), tokenizer):
        raise UserError(f"distill.teacher={teacher.model.path}: distillation computes logits in tiles: {why}.")
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    ours, theirs = (chat_templates.rendered(one, one.chat_template, turns) for one in (tokenizer, _tokenizer(recipe)))
    if tokenizer.chat_template and ours != theirs:
        say(f"distill.teacher={teacher.model.path}: has another chat template than the model, whose template it reads")
    _attention[teacher.model.path] = probe.check_packing(teacher, tokenizer, distributed.on_gpu(), say)


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    path = recipe_of(recipe).model.path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"distill.teacher={path}: has no tokenizer to compare with the model's: {error}") from error


@dataclass(frozen=True)
class Teacher:
    """A frozen model that returns the likelihood of each next token."""

    engine: DeepSpeedEngine
    """DeepSpeed's engine under ZeRO-3, which gathers the weights, otherwise the model."""
    model: PreTrainedModel
    head: Head
    temperature: float

    @classmethod
    def of(cls, recipe: Recipe, entries: int, accelerator: Accelerator) -> "Teacher":
        """Load the teacher, which `check_model` has checked: under ZeRO-3 as shards, in 4 bits whole on each rank.

        `entries` is as from `check`.
        """
        teacher = recipe_of(recipe)
        attention = _attention[teacher.model.path]
        model = load.load_base(replace(teacher, model=replace(teacher.model, attention=attention)))
        if broken := loss_guard.damaged(model):
            raise UserError(
                f"distill.teacher={teacher.model.path}: {broken[0]} has values that are not finite; copy or download "
                "the teacher again."
            )
        say(f"teacher: {load.parameter_counts(model)[0]:,} parameters")
        model = model.requires_grad_(False).eval()
        sharded = any(hasattr(one, "ds_id") for one in model.parameters())
        engine = prepare_deepspeed(model, accelerator) if sharded else model.to(distributed.device())
        return cls(engine, model, output_head.head_of(model, entries), Distill.of(recipe).temperature)

    @torch.no_grad()
    def hidden(self, inputs: Batch, places: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states at some places of a batch, [places, hidden]; a collective under ZeRO-3."""

        def forward(**given: object) -> torch.Tensor:
            return hidden_states(self.model, given, places)

        return run_as(self.engine, self.model, forward, **read_by_models(inputs))

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which the head's weights are whole; a collective under ZeRO-3."""
        if self.engine is self.model:
            return nullcontext()
        return maybe_gather_lm_head_ctx(*self.head.weights)

    @torch.no_grad()
    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities for hidden states, [tokens, vocabulary], at the temperature; in `gathered`."""
        return (self.head.logits(hidden, *self.head.weights) / self.temperature).log_softmax(-1)

    def likeliest(self, inputs: Batch, places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens at places, and their log-probabilities with that of all others, on the CPU."""
        hidden, found = self.hidden(inputs, places), []
        with self.gathered():
            for part in hidden.split(max(1, divergence.ENTRIES // self.head.vocabulary)):
                log_probs = self.log_probs(part)
                tokens = log_probs.topk(count).indices
                found.append((tokens.int().cpu(), divergence.of_outcomes(log_probs, tokens).cpu()))
        tokens, log_probs = zip(*found, strict=True)
        return torch.cat(tokens), torch.cat(log_probs)


def read_by_models(inputs: Batch) -> Batch:
    """Return the part of a batch that models read."""
    return {name: inputs[name] for name in INPUTS if name in inputs}


def hidden_states(model: PreTrainedModel, inputs: Batch, places: torch.Tensor) -> torch.Tensor:
    """Return a causal model's last hidden states at some places, [places, hidden].

    Adapters may be inside the model, but no adapter model around it. `inputs` is the part of a batch that models read;
    `places` are numbers of tokens when all its sequences are concatenated.
    """
    states = model.base_model(**inputs, use_cache=False).last_hidden_state
    return states.flatten(0, 1).index_select(0, places)
