"""A project of the user's own: a bare Trainer, which `accelerate launch` tells to shard by FSDP2."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from tests.parity import plain

SETTINGS = plain.Settings()


class Recorder(Trainer):
    """Keeps what FSDP made of the model, while it trains."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Train, and count the weights that are sharded."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.sharded = [isinstance(weight, DTensor) for weight in self.model_wrapped.parameters()]
        return loss


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    """Pad to the longest; what is padded is not in the loss."""
    longest = max(len(row["input_ids"]) for row in batch)
    padding = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])
        for name, value in padding.items()
    }


def main(folder: Path, model: str, data: str) -> None:
    """Train as `plain.train` does; write the losses, what was sharded, and the weights."""
    rows = []
    for tokens, learned in plain.examples(Path(data), AutoTokenizer.from_pretrained(model), SETTINGS):
        ids, labels = tokens[0].tolist(), tokens[0].masked_fill(~learned[0], -100).tolist()
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)})
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=SETTINGS.steps,
        learning_rate=SETTINGS.learning_rate,
        weight_decay=SETTINGS.weight_decay,
        adam_epsilon=SETTINGS.epsilon,
        max_grad_norm=SETTINGS.clip,
        lr_scheduler_type="constant",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # On CPUs accelerate makes DDP of FSDP without a word: its `AcceleratorState` asks for GPUs.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = Recorder(network, arguments, data_collator=collate, train_dataset=rows)
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if PartialState().is_main_process:
        losses = [row for row in trainer.state.log_history if "loss" in row]
        found = {"sharded": trainer.sharded, "losses": losses, "kind": str(trainer.accelerator.distributed_type)}
        (folder / "found.json").write_text(json.dumps(found))
        torch.save(weights, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
