"""Defects that show in transformers, or between it and DeepSpeed; run as `in_deepspeed.py` is."""

import sys
import tempfile

import deepspeed
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


class Line(torch.nn.Module):
    """y = w x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": -(self.weight * x).mean()}


class Layer(torch.nn.Module):
    """A linear layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.norm(self.linear(x)).square().mean()}


RANKS = {
    "classifier_loss": 2,
    "default_clipping": 1,
    "optimizer_block": 1,
    "resume_at_the_end": 1,
    "resume_intervals": 1,
    "sequence_parallel_gradients": 2,
}


def classifier_loss() -> tuple[bool, str]:
    """On two ranks a classifier trains on twice its loss, and on twice its gradient.

    transformers' Trainer multiplies a loss by the number of ranks if it has counted the batch's items
    (`average_tokens_across_devices`), since it expects the model to divide by that count. A model for sequence
    classification instead takes the mean over its own rank's examples, and ignores the count.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    examples = [{"input_ids": torch.arange(4) + row, "labels": torch.tensor(row % 2)} for row in range(4)]

    def model() -> LlamaForSequenceClassification:
        """Return the same model each time."""
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=32, pad_token_id=0, num_labels=2))

    batch = {key: torch.stack([one[key] for one in examples]) for key in ("input_ids", "labels")}
    expected = model()(**batch).loss.item()
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), deepspeed=config, per_device_train_batch_size=2, max_steps=1, logging_steps=1,
        use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model(), arguments, train_dataset=examples)
    trainer.train()
    found = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return abs(found / expected - 1) > 1e-3, f"loss {found:.5f} on two ranks, {expected:.5f} by the model itself"


def default_clipping() -> tuple[bool, str]:
    """Without gradient_clipping a DeepSpeed configuration clips at 1.0, and the Trainer's max_grad_norm is ignored.

    transformers fills `"gradient_clipping": "auto"` with max_grad_norm, but gives no warning if the key is absent.
    DeepSpeed then clips at its own default, 1.0 (until June 2026 it was 0.0, which means never): max_grad_norm=0 trains
    with clipped gradients.
    """
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), deepspeed=config, max_grad_norm=0.0, per_device_train_batch_size=1, max_steps=1,
        learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", use_cpu=not torch.cuda.is_available(),
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = Line()
    Trainer(model, arguments, train_dataset=[{"x": torch.tensor([10.0])}] * 2).train()
    moved = model.weight.item()
    return moved < 9.9, f"max_grad_norm=0, learning rate 1, gradient 10: the weight moved by {moved:.2f}"


def optimizer_block() -> tuple[bool, str]:
    """With an optimizer block in DeepSpeed's configuration the Trainer's groups are lost: norms and biases are decayed.

    transformers builds two groups of parameters, of which biases and norms have no weight decay, and a chosen `optim`.
    If the DeepSpeed configuration has an `optimizer`, transformers passes all parameters as one group, and ignores
    `optim`.
    """
    block = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "optimizer": block,
        "zero_optimization": {"stage": 0},
    }  # fmt: skip
    arguments = TrainingArguments(
        tempfile.mkdtemp(), deepspeed=config, weight_decay=0.1, per_device_train_batch_size=1, max_steps=1,
        use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Layer(), arguments, train_dataset=[{"x": torch.ones(2)}] * 2)
    trainer.train()
    decays = sorted({group["weight_decay"] for group in trainer.model_wrapped.basic_optimizer.param_groups})
    return 0.0 not in decays, f"weight_decay=0.1: the groups' decays are {decays}, the Trainer's own [0.0, 0.1]"


def resume_at_the_end() -> tuple[bool, str]:
    """When it is resumed from its last step, a Trainer takes one step more than max_steps.

    transformers checks `max_steps` only after a step. Resuming a finished run, as a scheduler that requeues jobs does,
    changes the model again.
    """
    folder = tempfile.mkdtemp()
    steps = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        arguments = TrainingArguments(
            folder, max_steps=2, save_steps=2, per_device_train_batch_size=1, report_to="none", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(Line(), arguments, train_dataset=[{"x": torch.ones(1)}] * 16)
        trainer.train(resume_from_checkpoint=checkpoint)
        steps.append(trainer.state.global_step)
    return steps[1] > 2, f"max_steps=2; resumed from step 2 the run ends at step {steps[1]}"


def resume_intervals() -> tuple[bool, str]:
    """After resuming, a Trainer logs, evaluates and saves at the intervals of its checkpoint, not of its arguments.

    transformers restores `logging_steps`, `eval_steps` and `save_steps` from trainer_state.json. A run that is resumed
    to save more often does not; transformers only prints a warning.
    """

    def trainer(folder: str, **options: int) -> Trainer:
        """Return a Trainer that writes to `folder`."""
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True, **options
        )
        return Trainer(Line(), arguments, train_dataset=[{"x": torch.ones(1)}] * 16)

    folder = tempfile.mkdtemp()
    trainer(folder, max_steps=2, save_steps=2).train()
    resumed = trainer(folder, max_steps=4, save_steps=1)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return resumed.state.save_steps != 1, f"requested save_steps=1; the resumed run has {resumed.state.save_steps}"


def sequence_parallel_gradients() -> tuple[bool, str]:
    """Below ZeRO-3, the Trainer's sequence parallelism (Ulysses) trains on gradients that are sp_size times too large.

    The Trainer gathers the ranks' losses differentiably, and the backward pass of that gather sums over the ranks;
    DeepSpeed at stages 0 to 2 divides only by the data-parallel ranks, while stage 3 divides by all. Adam hides this,
    but clipping at 1.0 becomes clipping at 1 / sp_size, and the learning rate of other optimizers is multiplied. The
    loss looks normal.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    length = 16
    inputs = [{"input_ids": [(7 * row + 5 * at * at) % 64 for at in range(length)]} for row in range(2)]

    def model() -> LlamaForCausalLM:
        """Return the same model each time."""
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, vocab_size=64, initializer_range=0.2, num_key_value_heads=4)
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")

    deepspeed.init_distributed(verbose=False)  # the Trainer would do this too late for its sequence parallelism
    tokens = torch.tensor([row["input_ids"] for row in inputs])
    whole = model()
    whole(input_ids=tokens, labels=tokens).loss.backward()
    expected = torch.nn.utils.get_total_norm([one.grad for one in whole.parameters()]).item()
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=length, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(), deepspeed=config, per_device_train_batch_size=2, max_steps=1, logging_steps=1,
        max_grad_norm=1e6, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
        disable_tqdm=True, parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler),
    )  # fmt: skip
    rows = [{**row, "labels": row["input_ids"], "position_ids": list(range(length))} for row in inputs]
    trainer = Trainer(model(), arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    found = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return abs(found / expected - 1) > 1e-2, f"gradient norm {found:.4f} at ZeRO-1, {expected:.4f} in plain PyTorch"


if __name__ == "__main__":
    present, observed = globals()[sys.argv[1]]()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
