"""An optimizer block in the DeepSpeed configuration silently drops the Trainer's groups: norms and biases are decayed.

transformers builds two groups of parameters, of which biases and norms have no weight decay, and a chosen `optim`. If
the DeepSpeed configuration has an `optimizer`, transformers passes all parameters as one group, and ignores `optim`.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

RANKS = 1


class Layer(torch.nn.Module):
    """A linear layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.norm(self.linear(x)).square().mean()}


def measure() -> tuple[bool, str]:
    """Return whether every parameter is decayed."""
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


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
