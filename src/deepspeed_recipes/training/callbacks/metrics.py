"""Writes the numbers of a run once per logged step: to metrics.jsonl, to the tracker, and on the screen.

MFU (model FLOPs utilisation) needs the operations per token; the screen has a bar on a terminal, and lines elsewhere.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...recipe.files import Json
from ...recipe.gpus import GIB, peak_flops
from ...recipe.run_folder import RunFolder, accept_recipe, append_jsonl, read_jsonl
from ...report.page import duration
from ...report.sections import curves
from .. import distributed
from ..console import say
from ..data.collate import Batch
from ..model.load import whole_shape


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of forward and backward pass; recomputation is not counted, by MFU's definition."""

    per_token: float
    """Products with weights: 2 per weight forward, 2 for the gradient of the input, 2 for that of a trained weight."""
    per_squared_length: float
    """Causal attention, per squared length of a document: scores and values, s^2 d each forward, twice that back."""

    def of(self, tokens: float, squared_lengths: float) -> float:
        """Return the operations for documents with this number of tokens and this sum of squared lengths."""
        return self.per_token * tokens + self.per_squared_length * squared_lengths


def training_flops(model: torch.nn.Module) -> TrainingFlops:
    """Return the operations per token of a causal language or reward model, with or without adapters, sharded or not.

    An embedding is a look-up and costs nothing, unless it is tied and so also the last matrix product. In an MoE model
    a token uses `num_experts_per_tok` experts. Sliding windows are counted as full attention.
    """
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()  # a reward model has none
    tied = head is not None and head.weight is embedding
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    used = config.num_experts_per_tok / experts if experts else 1.0
    total = 0.0
    for name, parameter in model.named_parameters():
        size = whole_shape(parameter)
        if len(size) < 2 or (parameter is embedding and not tied):
            continue
        share = used if ".experts." in name else 1.0
        total += share * (6 if parameter.requires_grad else 4) * size.numel()
    heads = getattr(config, "num_attention_heads", 0)  # a state-space model has none
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
    if hasattr(config, "qk_head_dim"):  # MLA: `head_dim` is only the rotated part of a query
        width = heads * (config.qk_head_dim + config.v_head_dim) / 2
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    attending = [kind for kind in kinds if kind == "hybrid" or ("attention" in kind and kind != "linear_attention")]
    return TrainingFlops(total, 6.0 * len(attending) * width)


class Progress(TrainerCallback):
    """A progress bar over the optimizer steps."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Open the bar."""
        if distributed.is_first():
            options = {"unit": "step", "disable": not sys.stdout.isatty(), "dynamic_ncols": True}
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, **options)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.update(1)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


OWN = (
    *(("rewards/accuracies", "reward accuracy", ".0%"), ("accuracy", "accuracy", ".0%"), ("reward", "reward", ".3f")),
    *(("rewards/margins", "reward margin", ".2f"), ("kl", "KL", ".2f")),
)
"""A method's own numbers in a step's line, over the training examples since the last log. TRL's rewards do not rank the
held-out pairs: DPO's are likelihoods relative to the reference model's."""


OTHERS = (*curves.MORE, "layers", "clip_ratio/", "completions/")
"""Prefixes of the additional numbers that some methods and models log."""


class Metrics(TrainerCallback):
    """Counts tokens and waiting time of the batches that the loader yields, and writes a record at every log.

    `tokens_per_second` counts every token that is not padding, over all ranks, in the training time between two logs,
    without evaluations and checkpoints.
    """

    def __init__(
        self,
        run: RunFolder,
        on_record: Callable[[Json], None],
        counts: bool,
        flops: TrainingFlops,
        utilization: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """Continue the numbers of an earlier start of the same run.

        `on_record` is called on rank 0 with every record; `counts` is whether this rank counts, among those that read
        the same sequences. `utilization` returns this rank's GPU utilization since the last call.
        """
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
        self.flops = flops
        self.utilization = utilization
        self.also: set[str] = set()
        """Names of numbers that the user's own callbacks have added to logs."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a `with` block as waiting for data, and start the timed window."""
        start = time.perf_counter()
        self.window_start = self.window_start or start
        yield
        self.waited += time.perf_counter() - start

    def leave_out(self, seconds: float) -> None:
        """Exclude time in which the run did something other than training: it wrote a profile."""
        if self.window_start is not None:
            self.window_start += seconds

    def count(self, batches: Iterable[Batch]) -> None:
        """Count the batches of an optimizer step, and remove their counts from them."""
        for batch in batches:
            if "tokens" in batch:  # our collator counts
                tokens, squares = batch.pop("tokens"), batch.pop("squared_lengths")
            else:  # TRL's preference collator gives a mask; summed on the device, no wait
                tokens, squares = batch["attention_mask"].sum(), 0
            self.new_tokens += tokens * self.counts
            self.new_squares += squares * self.counts

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Log also the first and the last step, and before every checkpoint.

        An average then never spans a checkpoint, and a resumed run logs the same as an uninterrupted one.
        """
        if state.global_step in (1, state.max_steps) or control.should_save:
            control.should_log = True
        return control

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Json, **_: object) -> None:
        """Write one record and a line; called on every rank, since the token counts are summed over them."""
        if not logs or "loss" not in logs:
            return
        elapsed = time.perf_counter() - (self.window_start or time.perf_counter())
        tokens, squares, waited = distributed.total(self.new_tokens, self.new_squares, self.waited)
        self.tokens += int(tokens)
        self.seconds += elapsed
        self.new_tokens, self.new_squares, self.waited, self.window_start = 0, 0, 0.0, None
        if not distributed.is_first():
            return
        peak, world = peak_flops(torch.cuda.get_device_name()) if distributed.on_gpu() else None, dist.get_world_size()
        mfu = {}
        if peak and elapsed and not logs.keys() & {"rewards/chosen", "reward"}:  # no second model, no generated answers
            mfu = {"mfu": self.flops.of(tokens, squares) / (elapsed * peak * world)}
        record = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "tokens_per_second": tokens / elapsed if elapsed else None,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data_wait_seconds": waited / world,
            **memory(),
            **self.utilization(),
            **mfu,
            **{key: value for key, value in logs.items() if key.startswith(OTHERS) or key in self.also},
        }
        accept_recipe(self.run)
        append_jsonl(self.run.metrics, record)
        step, last = state.global_step, state.max_steps

        def shown(key: str, digits: str) -> str:  # a step may have none, such as rewards if all functions failed
            return "-" if record[key] is None else format(record[key], digits)

        own = "".join(f"{name} {shown(key, digits)}  " for key, name, digits in OWN if key in record)
        say(
            f"step {step:>{len(str(last))}}/{last}  loss {record['loss']:z.4f}  {own}"
            f"lr {record['learning_rate']:.1e}  grad norm {shown('grad_norm', '.2f')}  "
            f"{shown('tokens_per_second', ',.0f')} tokens/s  {duration(self.seconds / step * (last - step))} left"
        )
        self.on_record(record)


def memory() -> dict[str, float]:
    """Return this rank's peak memory so far, in GiB: its process on the host, and torch's allocator on the GPU."""
    peak = {"host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if distributed.on_gpu():
        peak["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        peak["gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return peak
