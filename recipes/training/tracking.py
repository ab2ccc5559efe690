"""The numbers of a run, once per logged step: into metrics.jsonl, to W&B, and on the screen."""

import os
import resource
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from recipes.spec.gpus import peak_flops
from recipes.spec.recipe import Recipe, to_dict
from recipes.spec.run_folder import RunFolder, append_jsonl, read_jsonl
from recipes.training import world
from recipes.training.console import say, shown, step_line
from recipes.training.flops import Work

GIB = 2**30


class Metrics(TrainerCallback):
    """Counts tokens and waiting where the batches come out of the loader, and writes a record at every log.

    `tokens_per_second` counts every token that is not padding, over the whole world, in the time between two
    logs that went into training: evaluations and checkpoints are left out.
    """

    def __init__(self, run: RunFolder, on_record: Any, counts: bool) -> None:
        """`on_record(record)` is called on rank 0 with every record; `counts`: no other rank counts the same rows."""
        self.run = run
        self.on_record = on_record
        self.counts = counts
        earlier = read_jsonl(run.metrics)
        self.tokens = earlier[-1]["tokens"] if earlier else 0
        self.seconds = earlier[-1]["seconds"] if earlier else 0.0
        self.new_tokens = 0
        self.new_squares = 0
        self.waited = 0.0
        self.window_start: float | None = None
        self.work: Work | None = None

    def watch(self, trainer: Trainer, work: Work) -> None:
        """Count what goes into every optimizer step of `trainer`; `work`: what the model does per token."""
        fetch = trainer.get_batch_samples
        self.work = work

        def counted(epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            start = time.perf_counter()
            if self.window_start is None:
                self.window_start = start
            batches, items = fetch(epoch_iterator, num_batches, device)
            self.waited += time.perf_counter() - start
            for batch in batches:
                tokens, squares = _count(batch)
                self.new_tokens += tokens * self.counts
                self.new_squares += squares * self.counts
            return batches, items

        trainer.get_batch_samples = counted

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Log the first and the last step too, and before every checkpoint.

        A window of averages then never spans a checkpoint, and a resumed run logs what the first would have.
        """
        if state.global_step in (1, state.max_steps) or control.should_save:
            control.should_log = True
        return control

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write one record; called on every rank, since the token counts are summed over them."""
        if not logs or "loss" not in logs:
            return
        elapsed = time.perf_counter() - (self.window_start or time.perf_counter())
        tokens, squares, waited = world.total(self.new_tokens, self.new_squares, self.waited)
        self.tokens += int(tokens)
        self.seconds += elapsed
        self.new_tokens, self.new_squares, self.waited, self.window_start = 0, 0, 0.0, None
        if not world.is_first():
            return
        record = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "tokens_per_second": tokens / elapsed if elapsed else None,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data_wait_seconds": waited / torch.distributed.get_world_size(),
            **memory(),
            **self._utilisation(tokens, squares, elapsed, logs),
            **{key: value for key, value in logs.items() if key.startswith(("rewards/", "expert_load", "router_"))},
        }
        append_jsonl(self.run.metrics, record)
        say(step_line(record, state.max_steps))
        self.on_record(record)

    def _utilisation(self, tokens: float, squares: float, elapsed: float, logs: dict[str, Any]) -> dict[str, float]:
        """Return `mfu` on a GPU whose peak is known; for preferences, with their second model, it has no meaning."""
        peak = peak_flops(torch.cuda.get_device_name()) if world.on_gpu() else None
        if peak is None or not elapsed or "rewards/chosen" in logs:
            return {}
        return {"mfu": self.work.of(tokens, squares) / (elapsed * peak * torch.distributed.get_world_size())}


def _count(batch: dict[str, Any]) -> tuple[int | torch.Tensor, int]:
    """Return the tokens in a batch and the sum of its documents' squared lengths."""
    if "tokens" in batch:  # our collator counts
        return batch.pop("tokens"), batch.pop("squared_lengths")
    return batch["attention_mask"].sum(), 0  # TRL's preference collator gives a mask; on the device, not waited for


def memory() -> dict[str, float]:
    """Return this rank's peak memory in GiB, and how busy its GPU is in percent where there is one."""
    peak = {"host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if world.on_gpu():
        peak["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        peak["gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        peak |= _utilization()
    return peak


def _utilization() -> dict[str, float]:
    try:
        return {"gpu_utilization": torch.cuda.utilization()}
    except (ModuleNotFoundError, RuntimeError):  # it needs NVIDIA's management library
        return {}


class Tracker:
    """The W&B run of rank 0, or nothing."""

    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        """Decide the mode; W&B itself is started by `begin`."""
        self.recipe = recipe
        self.run = run
        self.mode = recipe.wandb.mode
        if self.mode == "online" and not has_key():
            self.mode = "offline"
        self.wandb: Any = None

    def begin(self, deepspeed_config: dict[str, Any]) -> None:
        """Start the W&B run, with the recipe and the resolved DeepSpeed configuration as its config."""
        if self.mode == "disabled" or not world.is_first():
            return
        import wandb  # a second of imports, which a run without it does not wait for

        self.wandb = wandb.init(
            mode=self.mode,
            # One W&B run for one run folder, however often it was restarted; a sweep's agent names the run itself.
            id=os.environ.get("WANDB_RUN_ID") or run_id(self.run),
            resume="allow",
            project=self.recipe.wandb.project,
            name=self.recipe.name,
            tags=[self.recipe.family, self.recipe.method, Path(self.recipe.deepspeed).stem],
            config={"recipe": to_dict(self.recipe), "deepspeed": deepspeed_config},
            dir=self.run.path,
            settings=wandb.Settings(silent=True),
        )

    def record(self, numbers: dict[str, Any]) -> None:
        """Send one object of metrics.jsonl or evaluations.jsonl."""
        if self.wandb is not None:
            self.wandb.log({key: value for key, value in numbers.items() if key != "step"}, step=numbers["step"])

    def end(self, summary: dict[str, Any]) -> str | None:
        """Close the W&B run; return how to look at it, for the last screen."""
        if self.wandb is None:
            return None
        self.wandb.summary.update(summary)
        where = self.wandb.url if self.mode == "online" else f"wandb sync {shown(self._parts())}"
        self.wandb.finish()
        return where

    def _parts(self) -> Path:
        """Return the folder of the offline run, or a pattern for the folders of all its parts, one per restart."""
        folder = Path(self.wandb.dir).parent
        pattern = f"offline-run-*-{self.wandb.id}"
        return folder.with_name(pattern) if len(list(folder.parent.glob(pattern))) > 1 else folder


def run_id(run: RunFolder) -> str:
    """Return the id that W&B knows the run by, kept in the run folder."""
    if not run.wandb_id.exists():
        run.wandb_id.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return run.wandb_id.read_text(encoding="utf-8").strip()


def has_key() -> bool:
    """Return whether this machine has a W&B API key, without asking for one or showing it."""
    import wandb

    return wandb.login(prompt=False, verify=False)
