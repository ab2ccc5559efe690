"""A typical bare `transformers.Trainer` under DeepSpeed: a peer in `ds-recipes benchmark overhead`.

    deepspeed --no_local_rank --num_gpus 2 peer_trainer.py MODEL SEQUENCES CONFIG MICRO_BATCH STEPS LOG_EVERY DTYPE

SEQUENCES is a dataset saved by `save_to_disk` with input_ids, labels and position_ids of one length, and `tokens`,
the number of tokens without padding. Prints the fields of metrics.jsonl: step, tokens, seconds, host_peak_gib.
"""

import json
import resource
import sys
import time

import deepspeed
import torch
import torch.distributed as dist
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class Clock(TrainerCallback):
    """Print the progress at every log."""

    def __init__(self, tokens_per_step: float) -> None:
        self.tokens_per_step = tokens_per_step

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print a record."""
        if "loss" in logs and state.is_world_process_zero:
            record = {
                "step": state.global_step,
                "tokens": self.tokens_per_step * state.global_step,
                "seconds": time.perf_counter() - self.start,
                "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "loss": logs["loss"],
            }
            print(json.dumps(record), flush=True)


def main(model, sequences, config, micro_batch, steps, log_every, dtype):
    """Train."""
    deepspeed.init_distributed()
    arguments = TrainingArguments(
        output_dir=f"{sequences}_trainer",
        deepspeed=config,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=int(micro_batch),
        max_steps=int(steps),
        learning_rate=1e-4,
        bf16=dtype == "bf16",
        logging_steps=int(log_every),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    precision = torch.bfloat16 if dtype == "bf16" else torch.float32
    data = load_from_disk(sequences)
    tokens = sum(data["tokens"]) / len(data) * int(micro_batch) * dist.get_world_size()
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=precision),
        args=arguments,
        train_dataset=data.remove_columns("tokens"),
        callbacks=[Clock(tokens)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    dist.destroy_process_group()  # otherwise the interpreter aborts if gloo's threads still run at its end


if __name__ == "__main__":
    main(*sys.argv[1:])
