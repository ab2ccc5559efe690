"""GRPO: of several answers to a prompt, those that score above their group's mean become likelier.

Shao et al. 2024, arXiv:2402.03300, on TRL's GRPOTrainer; also RLOO (Ahmadian et al. 2024, arXiv:2402.14740), on its
RLOOTrainer. The user's functions score the answers. Rollouts are TRL's, except for sampling and scoring, and so are
advantages; the losses are computed here, since TRL reads a dozen numbers at every pass. Only the rollout waits for the
device, once per step.
"""

import math
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.models.utils import unwrap_model_for_generation

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.methods import Grpo
from ...recipe.methods.grpo import weights_of
from ...recipe.recipe import Recipe
from ...recipe.run_folder import append_jsonl
from .. import distributed
from ..console import say, show
from ..data import load, report, thinking, tokenize, updates
from ..data.collate import Batch
from ..model.control_tokens import conversation_tokens
from ..model.generate import continued, ends
from ..parallel import scores
from ..trainer import Parts, RunContext
from . import preferences, sft
from .rollouts import scoring
from .rollouts.hooks import RolloutHooks


@dataclass(frozen=True)
class Clip:
    """Limits of the ratio of a likelihood to its rollout's: between 1 - low and 1 + high."""

    low: float
    high: float

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the clipped objective, to be minimised (the paper's equation 3; PPO's, arXiv:1707.06347)."""
        return -torch.min(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)

    def shares(self, ratio: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the clipped ratios, as booleans for the log."""
        low = (ratio < 1 - self.low) & (advantages < 0)
        high = (ratio > 1 + self.high) & (advantages > 0)
        return {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/both": low | high}


def divergence(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the estimate of the KL divergence from the reference model at each token, never below 0 (equation 4)."""
    difference = reference - log_probs
    return difference.exp() - difference - 1


class RunGRPOTrainer(RolloutHooks, GRPOTrainer):
    """TRL's trainer with the run's hooks."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: TrainingArguments, **options: object
    ) -> torch.Tensor:
        """Return a micro-batch's share of the step's mean loss (the paper's equation 3), as TRL computes it."""
        log_probs, mask = self._log_probs(model, inputs)
        ratio = (log_probs - inputs.get("old_per_token_logps", log_probs.detach())).exp()
        advantages = inputs["advantages"][:, None]
        clip = Clip(self.epsilon_low, self.epsilon_high)
        losses = clip.surrogate(ratio, advantages)
        if "importance_sampling_ratio" in inputs:  # from a server, whose arithmetic differs
            losses = losses * inputs["importance_sampling_ratio"]
        if self.beta:
            kl = divergence(log_probs, inputs["ref_per_token_logps"])
            losses = losses + self.beta * kl
            self.averages.add({"kl": kl}, mask)
        self.averages.add(clip.shares(ratio.detach(), advantages), mask)
        if self.loss_type == "dapo":
            return (losses * mask).sum() * self.accelerator.num_processes / inputs["num_items_in_batch"].clamp(min=1.0)
        if self.loss_type == "dr_grpo":
            mean = (losses * mask).sum() / (len(losses) * self.max_completion_length)
        else:
            mean = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        return mean / self.current_gradient_accumulation_steps


class RunRLOOTrainer(RolloutHooks, RLOOTrainer):
    """TRL's trainer with the run's hooks."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: TrainingArguments, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch: a whole answer is one action."""
        log_probs, mask = self._log_probs(model, inputs)
        ratio = ((log_probs * mask).sum(-1) - inputs["old_logps"]).exp()
        clip = Clip(self.epsilon_low, self.epsilon_high)
        self.averages.add(clip.shares(ratio.detach(), inputs["advantages"]))
        return clip.surrogate(ratio, inputs["advantages"]).mean()


def arguments(common: Json, recipe: Recipe) -> GRPOConfig | RLOOConfig:
    """Return TRL's arguments. Their beta stays 0, so that TRL loads no second model; `RolloutHooks` has ours."""
    grpo = Grpo.of(recipe)
    shared: Json = {
        "num_generations": grpo.group_size,
        "max_completion_length": grpo.max_new_tokens,
        "temperature": grpo.temperature,
        "num_iterations": grpo.iterations,
        "epsilon": grpo.epsilon,
        "epsilon_high": grpo.epsilon_high,
        "beta": 0.0,
        "mask_truncated_completions": grpo.mask_truncated,
        "reward_weights": weights_of(recipe.reward, grpo.reward_weights),
        "ds3_gather_for_generation": grpo.gather,
        "router_aux_loss_coef": 0.0,
    }
    if grpo.vllm is not None:
        shared |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": grpo.vllm}
    if grpo.loss == "rloo":
        return RLOOConfig(**common, **shared)
    return GRPOConfig(**common, **shared, loss_type=grpo.loss, scale_rewards=grpo.scale)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return prompts, in a number that makes whole steps; the reward functions are tried on them."""
    found, held_out = load.read_examples(recipe, tokenizer)
    scoring.check(recipe, found.select(range(min(len(found), scoring.TRIED))).to_list())
    grpo = Grpo.of(recipe)
    longest = recipe.sequence_length - grpo.max_new_tokens
    prompts = found.map(_as_prompt, remove_columns=found.column_names)
    key = tokenize.cache_key(prompts, tokenizer, tokenizer, longest)
    fitting = prompts.filter(lambda row: len(_tokens(tokenizer, row)) <= longest, new_fingerprint=key)
    per_step = recipe.global_batch_size // grpo.group_size
    kept = fitting.select(range(len(fitting) // per_step * per_step))
    if not len(kept):
        raise UserError(
            f"data.path: {len(fitting)} of {len(found)} prompts leave room for grpo.max_new_tokens="
            f"{grpo.max_new_tokens} in sequence_length={recipe.sequence_length}; a step takes {per_step}."
        )
    if held_out is not None:
        for row in held_out:
            _as_prompt(row)
        unanswered = sum(not _has_answer(row) for row in held_out)
        if unanswered and recipe.data.metrics != ["loss"]:
            raise UserError(
                f"data.metric={recipe.data.metric}: {unanswered} of {len(held_out)} held-out prompts have no answer; "
                "add answers, or use data.metric=loss, which for GRPO is the mean reward."
            )
    if dropped := len(found) - len(fitting):
        say(
            f"warning: training: {dropped} of {len(found)} prompts ({dropped / len(found):.0%}) are dropped: they "
            f"leave no room for grpo.max_new_tokens={grpo.max_new_tokens} in sequence_length="
            f"{recipe.sequence_length}; raise sequence_length"
        )
    left = report.left_out(len(fitting) - len(kept), per_step)
    say(f"training: {len(kept)} prompts, {grpo.group_size} answers each{left}")
    sequences = len(kept) * grpo.group_size * grpo.iterations
    sample = _tokens(tokenizer, kept[0])
    shown = [[(tokenizer.decode(sample), False)]]
    show(shown)
    size = updates.Size(len(found), len(kept), sequences, None)
    return load.Datasets(kept, held_out, None, sample, size, {"shown": shown})


def _as_prompt(row: Json) -> Json:
    """Return the prompt, which TRL reads, and the example, for the reward functions."""
    if row["tools"]:
        raise UserError("data.path: an example has tools, which GRPO does not offer the model; remove them.")
    return {"prompt": row["messages"][: row["given"]], "example": scoring.example_of(row)}


def _tokens(tokenizer: PreTrainedTokenizerBase, row: Json) -> list[int]:
    return conversation_tokens(tokenizer, row["prompt"], add_generation_prompt=True)


def metric(trainer: RolloutHooks, examples: Dataset) -> dict[str, float]:
    """Return the mean `reward` of the greedy answers, and `exact_match` where each example has an expected answer.

    Answers without a reward are not in the mean. Only the text after the reasoning is compared, since rewards teach the
    model to reason in its own way. Rank 0 stores its first answers in the run folder.
    """
    recipe, scorer, tokenizer = trainer.context.recipe, trainer.scorer, trainer.processing_class
    grpo = Grpo.of(recipe)
    synced = trainer.context.file.stage == 3 and not grpo.gather
    answered: list[tuple[Json, list[int]]] = []
    with unwrap_model_for_generation(
        trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=grpo.gather
    ) as model:
        for batch, count in scores.rank_batches(examples, scores.GENERATION_BATCH, recipe.layout):
            prompts = [_tokens(tokenizer, _as_prompt(row)) for row in batch]
            said = continued(model, tokenizer, prompts, grpo.max_new_tokens, synced)
            answered += list(zip(batch[:count], said, strict=False))
    texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for _, tokens in answered]
    totals = [
        scorer.total(scorer.scores(text, scoring.example_of(row)))
        for (row, _), text in zip(answered, texts, strict=True)
    ]
    known = [total for total in totals if not math.isnan(total)]
    stop, compared = ends(trainer.model, tokenizer), []
    for row, tokens in answered:
        if _has_answer(row):
            bare = tokens[:-1] if tokens and tokens[-1] in stop else tokens
            # Special tokens stay, since they may separate reasoning from the rest.
            answer = thinking.final(tokenizer.decode(bare, skip_special_tokens=False))
            compared.append((row, thinking.final(row["messages"][row["given"]]["content"]), answer))
    right = sum(wanted == said for _, wanted, said in compared)
    summed, counted, matched, judged = distributed.total(sum(known), len(known), right, len(compared))
    if distributed.is_first():
        for row, wanted, answer in compared[: sft.SAMPLES]:
            prompt = "\n".join(
                f"{turn['role']}: {turn.get('content') or ''}" for turn in row["messages"][: row["given"]]
            )
            sample = sft.sample(prompt, wanted, answer)
            append_jsonl(trainer.context.run.answers, {"step": trainer.state.global_step, **sample})
    if not counted:
        raise UserError(
            f"{scorer.key}: none of the {len(examples)} answers to held-out examples has a reward; the warnings above "
            "give the reasons."
        )
    measured = {"reward": summed / counted}
    measured |= {"exact_match": matched / judged} if judged == len(examples) else {}
    pairs = [(answer, wanted) for _, wanted, answer in compared]
    return measured | scores.own_metrics(recipe, pairs, trainer.context.run, trainer.state.global_step)


def _has_answer(row: Json) -> bool:
    return len(row["messages"]) > row["given"]


def trainer(context: RunContext, parts: Parts) -> RolloutHooks:
    """Return the trainer, with a reference model if all weights are trained and beta is above 0."""
    kind = RunRLOOTrainer if Grpo.of(context.recipe).loss == "rloo" else RunGRPOTrainer
    return kind.of(context, parts, reference=preferences.reference_of(context.recipe))
