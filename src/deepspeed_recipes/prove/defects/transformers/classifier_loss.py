"""On two ranks a classifier trains on twice its loss, and on twice its gradient.

transformers' Trainer multiplies a loss by the number of ranks if it has counted the batch's items
(`average_tokens_across_devices`), since it expects the model to divide by that count. A model for sequence
classification instead takes the mean over its own rank's examples, and ignores the count.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

RANKS = 2
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
EXAMPLES = [{"input_ids": torch.arange(4) + row, "labels": torch.tensor(row % 2)} for row in range(4)]


def model() -> LlamaForSequenceClassification:
    """Return the same model each time."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0, num_labels=2))


def measure() -> tuple[bool, str]:
    """Return whether the Trainer's first loss differs from the model's on the same four examples."""
    batch = {key: torch.stack([one[key] for one in EXAMPLES]) for key in ("input_ids", "labels")}
    expected = model()(**batch).loss.item()
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), deepspeed=config, per_device_train_batch_size=2, max_steps=1, logging_steps=1,
        use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model(), arguments, train_dataset=EXAMPLES)
    trainer.train()
    found = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return abs(found / expected - 1) > 1e-3, f"loss {found:.5f} on two ranks, {expected:.5f} by the model itself"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
