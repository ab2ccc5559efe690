"""The methods that learn from pairs of answers, DPO, ORPO, SimPO and reward models, on TRL's trainers.

The reference is the model before training. To compute its log-probabilities once, in advance, TRL gives the model to a
second DeepSpeed engine before the run's, whose hooks stay on its modules under ZeRO-3; `RunDPOTrainer` uses the run's
engine, before the first step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.layout import data_parallel_size
from ...recipe.methods import Dpo, Orpo, Simpo
from ...recipe.recipe import Recipe
from ...recipe.run_folder import read_json, write_json
from .. import distributed
from ..console import say, show
from ..data import load, tokenize, updates
from ..data.collate import IGNORED, KEY, Batch
from ..model.load import load_model
from ..parallel import scores
from ..trainer import Parts, RunContext, RunHooks
from .averages import Averaging

SIDES = ("chosen", "rejected")


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return pairs as the tokens of a prompt and its two answers, without too long or equal ones."""
    pairs, held_out = load.read_examples(recipe, tokenizer)
    shown = tokenize.first_answers(pairs, tokenizer)
    show(shown)
    tokens = tokenize.mapped(pairs, tokenizer, partial(with_tokens, tokenizer=tokenizer))
    differing = tokens.filter(lambda pair: pair["chosen_ids"] != pair["rejected_ids"])
    if equal := len(tokens) - len(differing):
        alike = f"{equal} of {len(tokens)} pairs have two answers of the same tokens, as the chat template renders them"
        if not len(differing):
            raise UserError(f"data.path: {alike}; training needs pairs that differ.")
        say(f"warning: training: {alike}; they are dropped")
    kept = tokenize.fitting(differing, recipe)
    say(f"training: {len(kept)} pairs")
    size = updates.Size(len(pairs), len(kept), len(kept), None)
    sample = kept[0]["prompt_ids"] + kept[0]["chosen_ids"]
    return load.Datasets(kept, held_out, None, sample, size, {"shown": shown})


def with_tokens(pair: Json, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the columns that the collator reads."""
    (chosen, start), (rejected, other) = (tokenize.answered(tokenizer, pair, side) for side in SIDES)
    start = min(start, other)
    return {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}


class PairHooks(RunHooks):
    """The run's overrides of a TRL trainer, for pairs that `datasets` has tokenized."""

    def __init__(self, context: RunContext, *, processing_class: PreTrainedTokenizerBase, **options: object) -> None:
        collator = DataCollatorForPreference(processing_class.pad_token_id)
        super().__init__(context, processing_class=processing_class, data_collator=collator, **options)

    pairs_per_pass = 1.0
    """The pairs of the step divided by its micro-batches, both over all ranks."""
    uneven = False
    """True if some ranks have fewer pairs in the step's last micro-batch."""

    def prepare_step(self, batches: list[Batch], items: object) -> tuple[list[Batch], object]:
        """Count the step's pairs, by which `mean` divides; the last step of an epoch may have fewer."""
        recipe, pairs = self.context.recipe, len(self.train_dataset)
        at = self.state.global_step % updates.per_epoch(pairs, recipe.global_batch_size) * recipe.global_batch_size
        count = min(recipe.global_batch_size, pairs - at)
        ranks = data_parallel_size(recipe.layout, dist.get_world_size())
        self.pairs_per_pass = count / len(batches) / ranks
        self.uneven = ranks > 1 and count % (recipe.micro_batch_size * ranks) > 0
        return super().prepare_step(batches, items)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's part of the step's mean over pairs, in which each pair counts the same, [].

        The Trainer averages over micro-batches and DeepSpeed over ranks, and TRL does not change that. A smaller
        micro-batch in the last step of an epoch would make its pairs count more than the others.
        """
        return losses.sum() * (not self.filler) / self.pairs_per_pass

    def _prepare_dataset(self, dataset: Dataset, *arguments: object) -> Dataset:
        """Return the pairs unchanged, where TRL's DPO and reward trainers would tokenize them."""
        return dataset

    def tokenize_row(self, feature: Json, model: PreTrainedModel | None = None) -> Json:
        """Return a pair unchanged, where TRL's ORPO and CPO trainers would tokenize it."""
        return feature


def of_pairs(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the numbers to log for the rewards of pairs, [pairs] each."""
    margins = chosen - rejected
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": margins > 0,
    }


class FusedHead(RunHooks):
    """A trainer that gives its model the head; TRL's DPO and KTO trainers do that themselves."""

    def __init__(self, context: RunContext, **options: object) -> None:
        """`options` are passed to the trainer's own class."""
        super().__init__(context, **options)
        add_fused_lm_head(self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model)


def log_probs_of(model: PreTrainedModel, inputs: Batch, labelled: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first, [sequences, length - 1]; 0 where it is not labelled.

    `inputs` are `input_ids` and `attention_mask`, [sequences, length]; `labelled` has booleans of the same shape.
    """
    labels = inputs["input_ids"].masked_fill(~labelled, IGNORED)
    passed = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model(**passed, labels=labels, use_cache=False, fused_lm_head=True).log_probs


def mean_of(log_probs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the mean log-probability of the tokens that `counted` selects, [sequences]."""
    counted = counted[:, 1:]
    return (log_probs.float() * counted).sum(-1) / counted.sum(-1)


def reference_of(recipe: Recipe) -> PreTrainedModel | None:
    """Return the model before training, or None with adapters: without them, the model is its own reference."""
    return load_model(recipe) if recipe.method.asks_reference and recipe.lora is None else None


def with_reference(kind: type[RunHooks]) -> Callable[[RunContext, Parts], RunHooks]:
    """Return a method's `trainer` for a class of TRL's, with a reference model where all weights are trained.

    With adapters the model without them is the reference. TRL would load a second model by itself, but not as the run
    loads the first: also from pickles, and under ZeRO-3 with rotary frequencies rounded to the training dtype.
    """
    return lambda context, parts: kind.of(context, parts, ref_model=reference_of(context.recipe))


REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
UNEVEN = "uneven"
"""Key of a micro-batch of which some ranks have fewer pairs."""


class RunDPOTrainer(PairHooks, DPOTrainer):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), by TRL's trainer with our hooks."""

    before: torch.Tensor | None = None
    """The reference model's log-likelihoods of all pairs, if they are computed once; [pairs, 2], on the host."""
    one_by_one = False
    """True if some ranks have fewer pairs in this micro-batch."""

    def prepare_step(self, batches: list[Batch], items: object) -> tuple[list[Batch], object]:
        """Also mark the micro-batch of which some ranks have fewer pairs."""
        batches, items = super().prepare_step(batches, items)
        return [*batches[:-1], {**batches[-1], UNEVEN: self.uneven}], items

    def _precompute_ref_logps(self, dataset: Dataset, *arguments: object) -> Dataset:
        """Return the pairs unchanged; TRL's computation here is postponed until the engine exists."""
        return dataset

    def on_engine_ready(self) -> None:
        """Also compute or read the reference model's log-likelihoods of all pairs; a collective.

        A new run computes them under the current model, without its adapters if it has any, and stores them in its
        folder, for when it is resumed with a model that has changed.
        """
        super().on_engine_ready()
        if not self.precompute_ref_logps:
            return
        context, pairs = self.context, self.train_dataset
        if context.checkpoint:
            place = context.run.reference
            stored = read_json(place, [])
            if len(stored) != len(pairs):
                raise UserError(
                    f"dpo.precompute=true: {place} has the reference's log-probabilities of {len(stored)} pairs, and "
                    f"the data has {len(pairs)}; resume with the data and the settings that the run started with."
                )
            self.before = torch.tensor(stored)
            return
        say(f"reference: log-probabilities of {len(pairs)} pairs, computed once")
        size, ranks, rank = context.recipe.micro_batch_size, dist.get_world_size(), dist.get_rank()
        parts = []
        self.deepspeed.eval()
        for start in range(0, len(pairs), ranks * size):  # under ZeRO-3 ranks must make equally many passes
            first = start + rank * size
            own = [pairs[min(number, len(pairs) - 1)] for number in range(first, first + size)]
            with torch.no_grad():
                inputs = self._prepare_inputs(self.data_collator(own))
                said = torch.stack(self.compute_ref_log_probs(self.deepspeed, inputs), dim=1).float()
                parts += [part.cpu() for part in distributed.gathered(said)]
        self.deepspeed.train()
        self.before = torch.cat(parts)[: len(pairs)]
        if distributed.is_first():
            write_json(context.run.reference, self.before.tolist())

    def training_step(self, model: torch.nn.Module, inputs: Batch, *arguments: object) -> torch.Tensor:
        """Return the loss of a micro-batch, with the reference model's log-likelihoods of its pairs."""
        if self.before is not None:
            sides = self.before[inputs[KEY]].to(self.args.device, non_blocking=True).unbind(1)
            inputs |= dict(zip(REFERENCE, sides, strict=True))
        self.one_by_one = inputs.pop(UNEVEN, False)
        return super().training_step(model, inputs, *arguments)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return a micro-batch's part of the step's mean over pairs.

        TRL gathers the numbers of all ranks' pairs at every pass, which must be equally many: pairs that ranks cannot
        share evenly are passed one by one, and ranks that have no more pairs repeat theirs, without effect on the loss.
        """
        pairs, ordinary = len(inputs["input_ids"]) // 2, super().compute_loss
        if not self.one_by_one:
            return self.mean(ordinary(model, inputs, *arguments, **options).expand(pairs))
        losses = []
        for number in range(self.context.recipe.micro_batch_size):
            at = number % pairs
            one = {  # a micro-batch has all better answers, then all worse ones
                name: value[[at]] if name in REFERENCE else value[[at, pairs + at]] if torch.is_tensor(value) else value
                for name, value in inputs.items()
            }
            losses.append(ordinary(model, one, *arguments, **options) * (number < pairs))
        return self.mean(torch.stack(losses))


class RunORPOTrainer(FusedHead, Averaging, PairHooks, ORPOTrainer):
    """ORPO: imitates the better answer and raises its odds above the worse one's, without a reference model.

    Hong et al. 2024, arXiv:2403.07691. The odds ratio is that of TRL's trainer; its inputs are computed here, in tiles,
    since TRL's whole logits of two answers take gigabytes, and it reads a dozen numbers at every pass.
    """

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch of pairs, in nats (the paper's equation 6).

        Each pair counts the same. TRL averages the imitated tokens of a micro-batch instead, so that long answers count
        more, and its loss depends on the micro-batch and on the number of ranks; with one pair per micro-batch both are
        equal. As in TRL and in the authors' code, the better conversation is imitated with its prompt.
        """
        answers = inputs["completion_mask"].bool()
        pairs = len(answers) // 2
        imitated = inputs["attention_mask"][:pairs].bool()
        log_probs = log_probs_of(model, inputs, torch.cat([imitated, answers[pairs:]]))
        imitation = -mean_of(log_probs[:pairs], imitated)
        terms, chosen, rejected, *_ = self.odds_ratio_loss(*mean_of(log_probs, answers).chunk(2))
        self.averages.add(of_pairs(chosen, rejected) | {"nll_loss": imitation, "odds_loss": -terms})
        return self.mean(imitation - terms)


class RunSimPOTrainer(FusedHead, Averaging, PairHooks, CPOTrainer):
    """SimPO: makes the better answer's tokens likelier than the worse one's by a margin, without a reference model.

    Meng et al. 2024, arXiv:2405.14734. The loss is that of TRL's CPOTrainer; its inputs are computed here, as for ORPO.
    """

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch of pairs, in nats (the paper's equation 6)."""
        answers = inputs["completion_mask"].bool()
        log_probs = log_probs_of(model, inputs, answers)
        losses, chosen, rejected = self.cpo_loss(*mean_of(log_probs, answers).chunk(2))
        self.averages.add(of_pairs(chosen, rejected))
        return self.mean(losses)


class RunRewardTrainer(Averaging, PairHooks, RewardTrainer):
    """Reward modelling: a model that gives each answer a number, higher for the better of two.

    The loss is Bradley and Terry's, `-log sigmoid(chosen - rejected)` (Ouyang et al. 2022, arXiv:2203.02155, eq. 1).
    """

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch, in nats, as TRL computes it but without reading from the device."""
        passed = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        chosen, rejected = model(**passed, use_cache=False).logits[:, 0].float().chunk(2)
        self.averages.add(of_pairs(chosen, rejected))
        return self.mean(-logsigmoid(chosen - rejected))


@dataclass(frozen=True)
class PairMethod:
    """A `TrainingMethod` that reads pairs."""

    trainer: Callable[[RunContext, Parts], PairHooks]
    value: Callable[..., torch.Tensor]
    """The function of `scores` for the number by which the answers of held-out pairs are ranked."""
    datasets: Callable[[Recipe, PreTrainedTokenizerBase], load.Datasets] = datasets

    def arguments(self, common: Json, recipe: Recipe) -> TrainingArguments:
        """Return TRL's arguments."""
        method, common = recipe.method, {**common, "max_length": recipe.sequence_length}
        if isinstance(method, Dpo):
            loss = {"loss_type": method.loss, "label_smoothing": method.label_smoothing, "beta": method.beta}
            return DPOConfig(**common, **loss, precompute_ref_log_probs=method.precompute)
        if isinstance(method, Orpo):
            return ORPOConfig(**common, beta=method.beta)
        if isinstance(method, Simpo):  # `cpo_alpha` would add CPO's imitation of the better answer
            return CPOConfig(**common, loss_type="simpo", cpo_alpha=0.0, beta=method.beta, simpo_gamma=method.gamma)
        return RewardConfig(**common)

    def metric(self, trainer: PairHooks, examples: Dataset) -> dict[str, float]:
        """Return how the model ranks pairs: `preference_accuracy` and `preference_margin`."""
        recipe, tokenizer, pairs = trainer.context.recipe, trainer.processing_class, list(examples)
        return scores.preferences(trainer.model, tokenizer, pairs, recipe.micro_batch_size, recipe.layout, self.value)


METHODS = {
    "dpo": PairMethod(with_reference(RunDPOTrainer), scores.log_likelihood),
    "orpo": PairMethod(RunORPOTrainer.of, partial(scores.log_likelihood, per_token=True)),
    "simpo": PairMethod(RunSimPOTrainer.of, partial(scores.log_likelihood, per_token=True)),
    "reward": PairMethod(RunRewardTrainer.of, scores.reward),
}
