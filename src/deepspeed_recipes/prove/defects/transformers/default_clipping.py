"""A DeepSpeed configuration without gradient_clipping clips at 1.0, and the Trainer's max_grad_norm is ignored.

transformers fills `"gradient_clipping": "auto"` with max_grad_norm, but gives no warning if the key is absent.
DeepSpeed then clips at its own default, 1.0 (until June 2026 it was 0.0, which means never): max_grad_norm=0 trains
with clipped gradients.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

RANKS = 1


class Line(torch.nn.Module):
    """y = w x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": -(self.weight * x).mean()}


def measure() -> tuple[bool, str]:
    """Return whether a gradient of 10 changes a weight by less than 10 at a learning rate of 1, without clipping."""
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


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
