"""Below ZeRO-3, the Trainer's sequence parallelism (Ulysses) trains on gradients that are sp_size times too large.

The Trainer gathers the ranks' losses differentiably, and the backward pass of that gather sums over the ranks;
DeepSpeed at stages 0 to 2 divides only by the data-parallel ranks, while stage 3 divides by all. Adam hides this, but
clipping at 1.0 becomes clipping at 1 / sp_size, and the learning rate of other optimizers is multiplied. The loss
looks normal.
"""

import tempfile

import deepspeed
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

RANKS = 2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LENGTH = 16
ROWS = [{"input_ids": [(7 * row + 5 * at * at) % 64 for at in range(LENGTH)]} for row in range(2)]


def model() -> LlamaForCausalLM:
    """Return the same model each time."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.2, num_key_value_heads=4)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def measure() -> tuple[bool, str]:
    """Return whether the first step's gradient norm differs from plain PyTorch's."""
    deepspeed.init_distributed(verbose=False)  # the Trainer would do this too late for its sequence parallelism
    tokens = torch.tensor([row["input_ids"] for row in ROWS])
    whole = model()
    whole(input_ids=tokens, labels=tokens).loss.backward()
    expected = torch.nn.utils.get_total_norm([one.grad for one in whole.parameters()]).item()
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(), deepspeed=config, per_device_train_batch_size=2, max_steps=1, logging_steps=1,
        max_grad_norm=1e6, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
        disable_tqdm=True, parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler),
    )  # fmt: skip
    rows = [{**row, "labels": row["input_ids"], "position_ids": list(range(LENGTH))} for row in ROWS]
    trainer = Trainer(model(), arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    found = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return abs(found / expected - 1) > 1e-2, f"gradient norm {found:.4f} at ZeRO-1, {expected:.4f} in plain PyTorch"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
