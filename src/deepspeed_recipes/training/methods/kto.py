"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306), by TRL: learns from answers that were judged good or bad."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import KTOConfig, KTOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.layout import data_parallel_size
from ...recipe.methods import Kto
from ...recipe.recipe import Recipe
from ..console import say, show
from ..data import load, report, tokenize, updates
from ..data.collate import Batch
from ..parallel import scores
from . import preferences
from .averages import Averaging
from .preferences import with_reference


class RunKTOTrainer(Averaging, KTOTrainer):
    """TRL's trainer with the run's hooks."""

    def _prepare_dataset(self, dataset: Dataset, *arguments: object) -> Dataset:
        """Return the examples as `datasets` made them; TRL would pair answers within each rank's own batch."""
        return dataset

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch (the paper's equations 7 and 8), as TRL computes it.

        TRL reads a dozen numbers from the device at every pass, and divides the answers by their labels, which also
        waits for it.
        """
        good = inputs["label"].bool()
        mismatched = self._compute_kl_logps(model, inputs)
        said = _log_likelihood(model, inputs)
        reference, adapters = self.ref_model, nullcontext()
        if reference is None:  # this model with its initial adapters
            reference, wrapped = self.model, self.accelerator.unwrap_model(self.model)
            adapters = use_adapter(wrapped, "ref" if "ref" in wrapped.peft_config else None)
        plain = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), plain, adapters:
            kl = (mismatched - self._compute_kl_logps(reference, inputs)).mean()
            before = _log_likelihood(reference, inputs)
        dist.all_reduce(kl)
        kl = (kl / dist.get_world_size()).clamp(min=0)
        ratio = said - before
        weights = torch.where(good, self.desirable_weight, self.undesirable_weight)
        rewards = self.beta * ratio.detach()
        self.averages.add({"rewards/chosen": rewards}, good)
        self.averages.add({"rewards/rejected": rewards}, ~good)
        self.averages.add({"kl": kl})
        return (weights * torch.sigmoid(self.beta * torch.where(good, kl - ratio, ratio - kl))).mean()

    def averaged(self) -> dict[str, float]:
        """Return the numbers to log; a margin if there were good and bad answers."""
        means = super().averaged()
        good, bad = means.get("rewards/chosen"), means.get("rewards/rejected")
        return means if good is None or bad is None else means | {"rewards/margins": good - bad}


def _log_likelihood(model: PreTrainedModel, inputs: Batch) -> torch.Tensor:
    return preferences.log_probs_of(model, inputs, inputs["completion_mask"].bool()).sum(-1)


def arguments(common: Json, recipe: Recipe) -> KTOConfig:
    """Return TRL's arguments."""
    kto = Kto.of(recipe)
    weights = {"desirable_weight": kto.good_weight, "undesirable_weight": kto.bad_weight}
    return KTOConfig(**common, beta=kto.beta, max_length=recipe.sequence_length, **weights)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return tokens of judged answers, good and bad, in the order of training, each with a mismatched answer."""
    found, held_out = load.read_examples(recipe, tokenizer)
    if held_out and len(labels := set(held_out["label"])) == 1:
        say(
            f"held out: all {len(held_out)} judged answers are {'good' if labels == {True} else 'bad'}, so nothing is "
            "measured: the metric compares good ones with bad ones; data.validation=FILE or a larger "
            "data.validation_share holds out both"
        )
        held_out = None
    shown = tokenize.first_answers(found, tokenizer)
    show(shown)
    tokens = tokenize.mapped(found, tokenizer, partial(with_tokens, tokenizer=tokenizer))
    fits = tokenize.fitting(tokens, recipe).shuffle(recipe.seed)
    together = recipe.micro_batch_size * data_parallel_size(recipe.layout, dist.get_world_size())
    kept = fits.select(range(len(fits) // together * together))
    good = sum(kept["label"])
    if not 0 < good < len(kept):
        raise UserError(f"data.path: of {len(kept)} judged answers {good} are good; KTO needs good and bad ones.")
    say(f"training: {len(kept)} judged answers, {good} of them good{report.left_out(len(fits) - len(kept), together)}")
    kto, bad = Kto.of(recipe), len(kept) - good
    ratio = kto.good_weight * good / (kto.bad_weight * bad)
    if not 2 / 3 <= ratio <= 2:  # far from the range of the paper's equation 8
        key, value = "good_weight", kto.bad_weight * bad / good
        if ratio > 1:
            key, value = "bad_weight", kto.good_weight * good / bad
        say(
            f"warning: training: with their weights, the good answers count {ratio:.2g} times as much as the bad ones; "
            f"the paper advises 1 to 1.33, and kto.{key}={value:.3g} makes them count alike"
        )
    # Each gets another example's answer, from which the KL is estimated (section 4.1 of the paper): the answers of all
    # ranks' micro-batches rotate by one. TRL rotates within each rank's micro-batch, so that its estimate, and with it
    # the loss, depends on the number of ranks.
    others = [at - 1 if at % together else at + together - 1 for at in range(len(kept))]
    mismatched = kept.select(others).select_columns("completion_ids")
    mismatched = mismatched.rename_column("completion_ids", "KL_completion_ids")
    paired = concatenate_datasets([kept, mismatched], axis=1)
    size = updates.Size(len(found), len(kept), len(kept), None)
    sample = kept[0]["prompt_ids"] + kept[0]["completion_ids"]
    return load.Datasets(paired, held_out, None, sample, size, {"shown": shown})


def with_tokens(example: Json, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return the columns that TRL's collator reads."""
    tokens, start = tokenize.answered(tokenizer, example, "completion")
    return {"prompt_ids": tokens[:start], "completion_ids": tokens[start:], "label": example["label"]}


trainer = with_reference(RunKTOTrainer)


def metric(trainer: RunKTOTrainer, examples: Dataset) -> dict[str, float]:
    """Return how the model ranks good answers against bad ones: `judgement_accuracy` and `judgement_margin`."""
    recipe = trainer.context.recipe
    judged, batch_size = list(examples), recipe.micro_batch_size
    return scores.judgements(trainer.model, trainer.processing_class, judged, batch_size, recipe.layout)
