"""The run's overrides of TRL's trainers that learn from the model's own answers: GRPO's and RLOO's.

transformers samples from the rank's global random numbers, so that another number of ranks, another order or a resumed
run gives other answers. Here every answer has its own random numbers: `argmax(logits / T - log E)` with E from an
exponential distribution is a sample of `softmax(logits / T)` (the Gumbel-max trick; Maddison et al. 2014,
arXiv:1411.0030, section 2).
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl.models.utils import prepare_deepspeed, unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler, add_fused_lm_head

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.methods import Grpo
from ....recipe.run_folder import append_jsonl
from ... import distributed, server
from ...data.collate import Batch
from ...model.control_tokens import conversation_tokens
from ...model.generate import continued
from ...model_folder import expected
from ...trainer import RunContext
from ..averages import Averaging
from ..sft import cut
from .scoring import Scorer


class Noise(LogitsProcessor):
    """Adds each answer's own random numbers to its logits, so that the likeliest token is a sample."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        """`seeds`: one for each answer of the batch."""
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return noisy logits, [answers, vocabulary]."""
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        tiny = torch.finfo(torch.float32).tiny  # a draw may round to 0
        return scores.float() / self.temperature - noise.clamp_(min=tiny).log()


def seeds_of(seed: int, step: int, answers: Iterable[int]) -> list[int]:
    """Return a seed for each answer of a step, by its number in the global batch, or its example's in the data."""
    keys = (f"{seed} {step} {answer}".encode() for answer in answers)
    return [int.from_bytes(hashlib.blake2b(one, digest_size=7).digest()) for one in keys]


def written_answers(
    trainer: Trainer, prompts: Sequence[list[int]], noise: Noise, max_new_tokens: int, end: Sequence[int], gather: bool
) -> list[list[int]]:
    """Return the answers of a trainer's current model to prompts, without dropout; a collective under ZeRO-3.

    `noise` is for as many answers; `end` are the tokens that end one. With `gather`, ZeRO-3's weights are whole on
    every rank meanwhile.
    """
    training = trainer.model.training
    with unwrap_model_for_generation(
        trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather
    ) as model:
        model.eval()
        # With shards instead of whole weights, all ranks generate until the last has finished.
        synced = trainer.context.file.stage == 3 and not gather
        found = continued(model, trainer.processing_class, prompts, max_new_tokens, synced, end, noise)
        model.train(training)
    return found


def alike(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return which answers are in a group whose answers have the same rewards or none, [answers].

    `rewards` are [answers, functions], NaN where there are none.
    """
    groups = rewards.view(-1, group_size, rewards.shape[1])
    same = groups.nan_to_num(-math.inf).amax(1) <= groups.nan_to_num(math.inf).amin(1)
    return same.all(1).repeat_interleave(group_size)


EXAMPLES = "examples"
"""Key of a batch's list of prompts, which TRL's trainers convert to tensors themselves."""


class Groups(RepeatSampler):
    """TRL's sampler, which repeats each prompt for its group, in an order determined by the seed and the epoch.

    TRL draws all epochs' orders from one generator, so a run that resumes in the second epoch repeats the first order.
    """

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; the first is TRL's own."""
        self.generator.manual_seed(self.seed + epoch)


def together(examples: list[Json]) -> Json:
    """Return the prompts of a batch as one value; its tokens are counted once there are answers."""
    return {EXAMPLES: examples, "tokens": 0, "squared_lengths": 0}


class RolloutHooks(Averaging):
    """A TRL trainer whose answers do not depend on the ranks, and in which a failing reward ends no run."""

    def __init__(
        self, context: RunContext, *, processing_class: PreTrainedTokenizerBase, reference: object, **options: object
    ) -> None:
        """Take `reference`, the model before training or None; `options` are passed to the trainer's own class."""
        self.scorer = Scorer(context.recipe)
        functions = [_named(function.name) for function in self.scorer.functions]
        super().__init__(context, processing_class=processing_class, reward_funcs=functions, **options)
        self.data_collator = together
        self._compared: tuple[int, list[Json]] = (0, [])
        self.beta = Grpo.of(context.recipe).beta  # TRL got 0, or it would load a second model in its own way
        if reference is not None:
            add_fused_lm_head(reference, temperature=self.temperature)
            self.ref_model = prepare_deepspeed(reference, self.accelerator)

    # Before the first step

    def sequences_per_load(self) -> int:
        """Return the number of prompts, repeated for each answer, that a rank reads at once: those of a whole step."""
        return self._train_batch_size * self.args.steps_per_generation

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        return Groups(
            self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed,
        )

    def on_engine_ready(self) -> None:
        """Continue within the updates of the checkpoint's last rollout; TRL would begin with a new rollout."""
        super().on_engine_ready()
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        checkpoint = self.context.checkpoint
        if checkpoint is not None and (kept := _kept(checkpoint)).exists():
            self._buffered_inputs = torch.load(kept, map_location=distributed.device(), weights_only=True)

    # In a step

    def _prepare_inputs(self, generation_batch: Json) -> Json:
        return super()._prepare_inputs(generation_batch[EXAMPLES])

    def _tokenize_prompts(self, prompts: list[list[Json]]) -> tuple[list[list[int]], None, Json]:
        """Return tokens as everywhere in a run: control tokens that a person has written are text."""
        tokens = [conversation_tokens(self.processing_class, turns, add_generation_prompt=True) for turns in prompts]
        return tokens, None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, torch.Tensor]]) -> Json:
        """Return answers to a step's prompts with their advantages; count tokens, and keep the best and the worst."""
        with self.context.phases.phase("rollout"):
            output = super()._generate_and_score_completions(inputs)
        if self.beta == 0 or Grpo.of(self.context.recipe).loss != "rloo":  # whose rewards contain the KL
            # The mean of equal numbers is rounded, and Adam's updates are as large for gradients of rounding alone.
            first = self.accelerator.process_index * len(inputs)
            output["advantages"][self._alike[first : first + len(inputs)]] = 0.0
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        self.context.metrics.count([{"attention_mask": mask}])
        step = self.state.global_step + 1
        if not distributed.is_first() or not (step == 1 or step % self.args.logging_steps == 0):
            return output
        rewards = {name: list(values) for name, values in self._logs["rewards"].items()}
        totals = [self.scorer.total(scores) for scores in zip(*rewards.values(), strict=True)]
        scored = [at for at, total in enumerate(totals) if not math.isnan(total)]
        for which, of in (("best", max), ("worst", min)) if scored else ():
            at = of(scored, key=totals.__getitem__)
            turns = (f"{turn['role']}: {turn.get('content') or ''}" for turn in self._logs["prompt"][at])
            row = {
                "step": step,
                "which": which,
                "reward": totals[at],
                "rewards": {name: values[at] for name, values in rewards.items()},
                "prompt": cut("\n".join(turns)),
                "answer": cut(self._logs["completion"][at][0].get("content") or ""),
            }
            append_jsonl(self.context.run.rollouts, row)
        return output

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: object) -> Any:
        if self.use_vllm:
            found = super()._generate_single_turn(prompt_ids, *others)
            self._check_server()
            return found
        first = self.accelerator.process_index * len(prompt_ids)
        numbers = range(first, first + len(prompt_ids))
        seeds = seeds_of(self.args.seed, self.state.global_step, numbers)
        noise = Noise(seeds, self.temperature, self.accelerator.device)
        longest, gather = self.max_completion_length, self.args.ds3_gather_for_generation
        found = written_answers(self, prompt_ids, noise, longest, self.eos_token_ids, gather)
        return found if Grpo.of(self.context.recipe).loss == "rloo" else (found, None)  # as each of TRL's trainers

    def _check_server(self) -> None:
        """Refuse a server whose weights are not those of the last transfer, where a comparison is due; a collective.

        A transfer that changes nothing on the server is found even if training has changed the answers by less than the
        bound: the server's are then at most half as far from the model's at the last comparison as from those of now.

        Raises:
            UserError: the server answers otherwise than the model, or gives no log-probabilities.
        """
        grpo, step = Grpo.of(self.context.recipe), self.state.global_step
        last, before = self._compared
        if not grpo.vllm_check_steps or (before and step < last + grpo.vllm_check_steps):
            return
        examples, training = expected.sequences(self.processing_class), self.model.training
        forward = partial(self.context.parallel.logits, self)
        mine = expected.measured(forward, examples, distributed.device())
        self.model.train(training)
        self._compared = step, mine

        def compare() -> None:
            theirs = expected.served(server.connect(str(grpo.vllm)), examples)
            now, earlier = (
                max(expected.apart(one["logprobs"], other["logprobs"]) for one, other in zip(own, theirs, strict=True))
                for own in (mine, before or mine)
            )
            # A server computes in bf16, its default for a model in fp32, too.
            if not now <= expected.BOUNDS["bfloat16"] or 2 * earlier < now:
                raise UserError(
                    f"grpo.vllm={grpo.vllm}: after the transfer of the weights of step {step}, the server's "
                    f"log-probabilities differ from the model's by {now:.2g} nats (bound {expected.BOUNDS['bfloat16']})"
                    + (f", and from those of step {last} by {earlier:.2g}.\n" if before else ".\n")
                    + "Restart it with this model and TRL's options (see grpo.vllm), or set grpo.vllm_check_steps=0."
                )

        distributed.check_on_first(compare)

    def _log_probs(self, model: PreTrainedModel, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each token of the answers, [answers, longest], and the mask of the loss."""
        prompts, answers = inputs["prompt_ids"], inputs["completion_ids"]
        mask = inputs["completion_mask"].bool()
        log_probs, entropy, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([prompts, answers], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            answers.size(1),
            compute_entropy=True,
        )
        self.averages.add({"entropy": entropy}, mask)
        return log_probs, mask

    def _calculate_rewards(
        self,
        inputs: list[dict[str, torch.Tensor]],
        prompts: list[list[Json]],
        completions: list[list[Json]],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """Return each function's number for each answer of all ranks, NaN where it returned none."""
        answers = [turns[0].get("content") or "" for turns in completions]
        mine = [self.scorer.scores(answer, example["example"]) for answer, example in zip(answers, inputs, strict=True)]
        rewards = self.accelerator.gather(torch.tensor(mine, device=self.accelerator.device))
        failed = rewards.isnan().any(dim=1)
        if self.state.global_step == 0 and failed.all():
            raise UserError(
                f"{self.scorer.key}: none of the {len(failed)} answers of the first step has a reward; the warnings "
                "above give the reasons."
            )
        self._metrics["train"]["rewards/failed"].append(failed.float().mean().item())
        self._alike = alike(rewards, self.num_generations)
        return rewards

    # Between steps

    def _save_checkpoint(self, model: PreTrainedModel, trial: object) -> None:
        """Save the answers that are still to be learned from, where a rollout is used in several updates."""
        super()._save_checkpoint(model, trial)
        if self.state.global_step % self.num_iterations:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            torch.save(self._buffered_inputs, _kept(folder))


def _kept(checkpoint: Path) -> Path:
    """Return the file in which a rank keeps its answers, specific to the rank and the number of ranks."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return checkpoint / f"rollout_{rank}_of_{ranks}.pt"


def _named(name: str) -> Any:
    """Return a function with a name, the only thing that TRL reads of its reward functions: see `Scorer`."""

    def function(**columns: object) -> list[float]:
        raise AssertionError(name)

    function.__name__ = name
    return function
