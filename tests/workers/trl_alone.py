"""TRL's own trainers in one process, without DeepSpeed and without our hooks: the reference of the methods on them."""

import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from deepspeed_recipes.prove.plain import Settings
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.training.model import heads
from deepspeed_recipes.training.model import lora as adapters
from tests.workers.own_code import Recorder

SEED = 42
SETTINGS = Settings(learning_rate=1e-3)
"""At 1e-2 every pair is ranked after three steps: of a loss of 0.001, log(1 + e^-margin), the rounding of a margin of 7
is 1e-5, whatever trains."""
ADAPTERS = Lora(rank=4, alpha=8)
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Recorded:
    """Keeps every loss as it was computed; the Trainer's log rounds it."""

    def training_step(self, *arguments):
        loss = super().training_step(*arguments)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class Reward(Recorded, RewardTrainer):
    """TRL's."""


class Kto(Recorded, KTOTrainer):
    """TRL's."""


class Dpo(Recorded, DPOTrainer):
    """TRL's."""


class Summed:
    """Takes the log-likelihood of a whole answer where the paper takes that of a token of it."""

    @staticmethod
    def get_batch_logps(*arguments, average_log_prob=False, **options):
        return ORPOTrainer.get_batch_logps(*arguments, **options)


class Orpo(Recorded, ORPOTrainer):
    """TRL's."""


class Cpo(Recorded, CPOTrainer):
    """TRL's."""


class SummedOrpo(Summed, Orpo):
    """A mistake."""


class SummedCpo(Summed, Cpo):
    """A mistake."""


def train(method: str, folder: str, data: str, output: str, lora: bool, mistake: str = "") -> None:
    """Train on all examples at every step; write losses, TRL's log, weights and events to `output`."""
    for name in DISTRIBUTED:
        os.environ.pop(name, None)
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    settings, tokenizer = SETTINGS, AutoTokenizer.from_pretrained(folder)
    common = {
        "output_dir": f"{output}/trainer",
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": len(rows),
        "max_steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": settings.weight_decay,
        "adam_epsilon": settings.epsilon,
        "max_grad_norm": 100.0 if mistake == "clip" else settings.clip,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
        "seed": SEED,
        "max_length": 128,
    }
    trainer = METHODS[method](folder, tokenizer, rows, common, ADAPTERS if lora else None, mistake)
    os.environ["EVENTS"] = output
    trainer.add_callback(Recorder())
    trainer.train()
    trainer.model.save_pretrained(output)
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    passes = len(trainer.losses) // len(logged)  # of one pair each, where a step has several
    losses = [sum(trainer.losses[start : start + passes]) for start in range(0, len(trainer.losses), passes)]
    records = [{**row, "loss": loss} for row, loss in zip(logged, losses, strict=True)]
    Path(output, "records.json").write_text(json.dumps(records), encoding="utf-8")


def reward(folder, tokenizer, rows, common, lora, mistake):
    """Return the trainer of a reward model; `label`: the better answer is taken for the worse."""
    rows = swapped(rows, mistake)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    heads.start(model, SEED + (mistake == "head"))
    model = adapters.add(model, lora, SEED, scores=True) if lora else model
    center = 0.01 if mistake == "center" else None
    options = RewardConfig(**common, center_rewards_coefficient=center)
    return Reward(model=model, args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def kto(folder, tokenizer, rows, common, lora, mistake):
    """Return the trainer of KTO on the good and the bad answers, in the order in which a run shuffles them.

    Mistakes: `label`, good answers are taken for bad ones; `beta`; `order`, other answers estimate the KL.
    """
    rows = [{**row, "label": row["label"] != (mistake == "label")} for row in rows]
    dataset = Dataset.from_list(rows).shuffle(SEED + (mistake == "order"))
    model = language_model(folder, lora)
    options = KTOConfig(**common, beta=0.2 if mistake == "beta" else 0.1)
    return Kto(model=model, args=options, train_dataset=dataset, processing_class=tokenizer)


def swapped(rows, mistake):
    """Return pairs; `label`: the better answer is taken for the worse."""
    if mistake != "label":
        return rows
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def language_model(folder, lora):
    """Return the model, with adapters where there are some."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return adapters.add(model, lora, SEED) if lora else model


def dpo(folder, tokenizer, rows, common, lora, mistake):
    """Return the trainer of DPO. Mistakes: `label`; `beta`; `reference`, another model than the one that is trained."""
    dataset, model, reference = Dataset.from_list(swapped(rows, mistake)), language_model(folder, lora), None
    if mistake == "reference":
        reference = language_model(folder, None)
        torch.nn.init.normal_(reference.model.norm.weight)
    options = DPOConfig(**common, beta=0.2 if mistake == "beta" else 0.1)
    given = {"model": model, "args": options, "train_dataset": dataset, "processing_class": tokenizer}
    return Dpo(**given, ref_model=reference)


def orpo(folder, tokenizer, rows, common, lora, mistake):
    """Return the trainer of ORPO on one pair after the other, since in larger batches TRL lets long answers count more.

    Mistakes: `label`; `beta`; `length`, whole answers instead of their tokens; `batch`, all pairs at once.
    """
    dataset, model = Dataset.from_list(swapped(rows, mistake)), language_model(folder, lora)
    if mistake != "batch":
        common |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(rows)}
    options = ORPOConfig(**common, beta=0.2 if mistake == "beta" else 0.1)
    trainer = SummedOrpo if mistake == "length" else Orpo
    return trainer(model=model, args=options, train_dataset=dataset, processing_class=tokenizer)


def simpo(folder, tokenizer, rows, common, lora, mistake):
    """Return the trainer of SimPO. Mistakes: `label`; `beta`; `gamma`; `length`, whole answers instead of tokens."""
    dataset, model = Dataset.from_list(swapped(rows, mistake)), language_model(folder, lora)
    beta, gamma = 3.0 if mistake == "beta" else 2.0, 0.5 if mistake == "gamma" else 1.0
    options = CPOConfig(**common, loss_type="simpo", cpo_alpha=0.0, beta=beta, simpo_gamma=gamma)
    trainer = SummedCpo if mistake == "length" else Cpo
    return trainer(model=model, args=options, train_dataset=dataset, processing_class=tokenizer)


METHODS = {"reward": reward, "kto": kto, "dpo": dpo, "orpo": orpo, "simpo": simpo}
