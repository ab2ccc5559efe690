"""TRL's own GRPO and RLOO trainers in one process, without DeepSpeed and without our hooks: the reference.

Only the sampling is ours, so that both write the same answers: TRL's own depends on the rank.
"""

import json
import os
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from deepspeed_recipes.prove.plain import Settings
from deepspeed_recipes.recipe.methods import Grpo
from deepspeed_recipes.training.methods.rollouts import hooks
from deepspeed_recipes.training.model.generate import continued
from tests.workers.trl_alone import ADAPTERS, DISTRIBUTED, SEED, Recorded, language_model

SETTINGS = Settings(steps=4, learning_rate=2e-4)
GRPO = Grpo(group_size=4, beta=0.1, iterations=2, max_new_tokens=8, epsilon=0.2)
"""Two updates per rollout: in the first no ratio differs from 1, so that nothing is clipped."""


def scored(answer: str) -> float:
    """Return a number that differs between any two answers: what the runs under test have in a file."""
    return sum(map(ord, answer)) % 11 / 10


class Sampled(Recorded):
    """Samples as a run does, in whatever order TRL asks; and the mistake of a wrong group."""

    mistake = ""

    def _generate_single_turn(self, prompt_ids, *others):
        seeds = hooks.seeds_of(SEED, self.state.global_step, range(len(prompt_ids)))
        noise = hooks.Noise(seeds, self.temperature, self.model.device)
        longest, end = self.max_completion_length, self.eos_token_ids
        found = continued(self.model, self.processing_class, prompt_ids, longest, end=end, noise=noise)
        return (found, None) if isinstance(self, GRPOTrainer) else found

    def _calculate_rewards(self, *arguments):
        rewards = super()._calculate_rewards(*arguments)
        return rewards.roll(1, 0) if self.mistake == "group" else rewards


class GrpoAlone(Sampled, GRPOTrainer):
    """TRL's."""


class RlooAlone(Sampled, RLOOTrainer):
    """TRL's."""


def train(loss: str, folder: str, data: str, output: str, lora: bool, mistake: str = "") -> None:
    """Train on two prompts per step with four answers each; write the losses, TRL's log and the weights to `output`.

    Mistakes: `group`, each answer has the reward of the one before it; `kl`, its sign; `ratio`, which
    weighs the KL; `beta`; `clip`; `scale`.
    """
    for name in DISTRIBUTED:
        os.environ.pop(name, None)
    rows = [json.loads(line)["messages"] for line in Path(data).read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    common = {
        "output_dir": f"{output}/trainer",
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "max_steps": SETTINGS.steps,
        "learning_rate": SETTINGS.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": SETTINGS.weight_decay,
        "adam_epsilon": SETTINGS.epsilon,
        "max_grad_norm": SETTINGS.clip,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": SEED,
        "num_generations": GRPO.group_size,
        "max_completion_length": GRPO.max_new_tokens,
        "num_iterations": GRPO.iterations,
        "epsilon": 0.02 if mistake == "clip" else GRPO.epsilon,
        "beta": {"beta": 2 * GRPO.beta, "kl": -GRPO.beta}.get(mistake, GRPO.beta),
    }
    # By default TRL weighs the KL by the ratio to the rollout (DeepSeek-V3.2); GRPO's paper does not, nor does a run.
    if loss == "rloo":
        kind, options = RlooAlone, RLOOConfig(**common)
    else:
        scale, weighed = "none" if mistake == "scale" else "group", mistake == "ratio"
        kind, options = (
            GrpoAlone,
            GRPOConfig(**common, loss_type=loss, scale_rewards=scale, use_bias_correction_kl=weighed),
        )
    kind.mistake = mistake
    trainer = kind(
        model=language_model(folder, ADAPTERS if lora else None),
        reward_funcs=[lambda completions, **_: [scored(turns[0]["content"]) for turns in completions]],
        args=options,
        train_dataset=Dataset.from_list([{"prompt": turns[:-1]} for turns in rows]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.save_pretrained(output)
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    records = [{**row, "loss": loss} for row, loss in zip(logged, trainer.losses, strict=True)]
    Path(output, "records.json").write_text(json.dumps(records), encoding="utf-8")
