"""Run one contender once, as a process: `python -m deepspeed_recipes.benchmarks.measure ORDER.json RESULT.json`.

Steps are timed without synchronising the device, and the places where Python waits for it are counted.
"""

import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import pack_dataset

from ..recipe import deepspeed_file
from ..recipe.conversions import to_dict
from ..recipe.files import Json
from ..recipe.gpus import GIB
from ..recipe.project import CONFIGS
from ..recipe.recipe import Draft, Recipe
from ..recipe.run_folder import RunFolder, read_json, write_recipe
from ..training import distributed, run, upstream
from ..training.arguments import common_arguments, gather_layers
from ..training.callbacks.metrics import training_flops
from ..training.data.collate import Collator
from ..training.data.load import Datasets
from ..training.distributed import describe_environment
from ..training.methods import sft
from ..training.model import attention, load, transforms
from ..training.model import lora as adapters
from ..training.model.draft import TINY_MODEL, shrink
from ..training.model.load import DTYPES
from ..training.tracking.trackers import Trackers
from ..training.trainer import Parts
from . import probe
from .cases import Case, recipe_of

MEAN, SPREAD = 900, 0.7
"""Median in tokens and standard deviation of the logarithm of the documents' lengths: log-normal, as in chat data."""


def config_of(recipe: Recipe, draft: bool | Draft) -> PreTrainedConfig:
    """Return the page's dimensions, or a draft's, by default the smallest."""
    config = AutoConfig.for_model(**recipe.model.config)
    if draft:
        config = shrink(
            config, draft if isinstance(draft, Draft) else Draft(), AutoTokenizer.from_pretrained(TINY_MODEL)
        )
    config.use_cache = False
    return config


def random_model(recipe: Recipe, draft: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the model with random weights, on the device where it will train, in 4 bits if the recipe sets that."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(recipe, draft),
            dtype=dtype or DTYPES[recipe.precision],
            attn_implementation=attention.loadable(recipe.model.attention),
        )
    return quantized(model) if recipe.model.quantization == "nf4" else model


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Quantise every linear layer but the head to 4 bits, as loading with `adapters.nf4` does."""
    import bitsandbytes as bnb

    settings = adapters.nf4(model.dtype)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=model.dtype,
                compress_statistics=settings.bnb_4bit_use_double_quant, quant_type=settings.bnb_4bit_quant_type,
                quant_storage=model.dtype, device="meta",
            )  # fmt: skip
            packed.weight = bnb.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type=settings.bnb_4bit_quant_type,
                compress_statistics=True, quant_storage=model.dtype, module=packed,
            )  # fmt: skip
            packed.bias = layer.bias
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, packed.to(layer.weight.device))
    model.is_loaded_in_4bit = True
    return model


def documents(recipe: Recipe, vocabulary: int, count: int) -> Dataset:
    """Return `count` documents, `input_ids` and `labels`, with lengths like those of chat data."""
    random = np.random.default_rng(0)
    median = min(MEAN, recipe.sequence_length / 4)
    lengths = np.exp(random.normal(np.log(median), SPREAD, count)).clip(8, recipe.sequence_length).astype(int)
    tokens = [random.integers(5, vocabulary, length).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": tokens, "labels": [[-100, *document[1:]] for document in tokens]})


def mean_lengths(sequences: Dataset) -> tuple[float, float]:
    """Return two means over the sequences: of tokens, and of the sum of the documents' squared lengths."""
    lengths = sequences["seq_lengths"]
    return (
        float(np.mean([sum(documents) for documents in lengths])),
        float(np.mean([sum(length**2 for length in documents) for documents in lengths])),
    )


OF_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
"""Operations whose result or output shape depends on the values: `item()`, `bool()`, `x[mask]`."""


class Reads(TorchDispatchMode):
    """Counts reads of tensors' values by Python, and blocking copies from a GPU, backward passes included.

    Only this thread is counted: on a GPU, not the threads that PyTorch starts for the backward pass.
    """

    def __init__(self, places: bool = False) -> None:
        """`places`: also record the lines that cause reads, which is slow."""
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] | None = Counter() if places else None

    @property
    def total(self) -> int:
        """The number of reads."""
        return self.counts.total()

    def __torch_dispatch__(
        self,
        function: Any,
        types: object,
        arguments: tuple[Any, ...] = (),
        options: Json | None = None,
    ) -> object:
        options = options or {}
        name = function.overloadpacket.__name__
        if _reads(name, arguments, options):
            self.counts[name] += 1
            if self.places is not None:
                self.places["".join(traceback.format_stack(limit=6)[:-1])] += 1
        return function(*arguments, **options)


def _reads(name: str, arguments: Sequence[Any], options: Json) -> bool:
    """Return whether Python waits for values: for `OF_VALUES`, where a mask selects, and for copies from a GPU."""
    # Assigning a single value does not depend on the mask's number of elements.
    if name == "index" or (name in ("index_put", "index_put_", "_index_put_impl_") and arguments[2].numel() != 1):
        return any(mask is not None and mask.dtype == torch.bool for mask in arguments[1])
    if name == "_to_copy":
        target = torch.device(options.get("device") or "meta")
        return arguments[0].is_cuda and target.type == "cpu" and not options.get("non_blocking")
    if name == "copy_":
        return arguments[1].is_cuda and arguments[0].device.type == "cpu" and not (len(arguments) > 2 and arguments[2])
    return name in OF_VALUES


class Clock:
    """Times the steps after a warm-up, counts the device reads of one more step, and ends the process.

    On a GPU it uses CUDA events, so that measuring does not synchronise.
    """

    def __init__(self, result: Path, asked: Json, facts: Json) -> None:
        """`asked`: the order, with the steps of both kinds; `facts`: written to `result` with the numbers."""
        self.result, self.warm_up, self.steps, self.facts = result, asked["warm_up"], asked["steps"], facts
        self.on_gpu = torch.cuda.is_available()
        self.marks: list[Any] = []
        self.done = 0
        self.reads = Reads()

    def step(self, loss: Callable[[], float | None] = lambda: None) -> None:
        """Mark the end of a step; `loss` reads the last loss. The last call does not return."""
        self.done += 1
        if self.done == self.warm_up and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if self.warm_up <= self.done <= self.warm_up + self.steps:
            mark: Any = torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter()
            if self.on_gpu:
                mark.record()
            self.marks.append(mark)
        if self.done == self.warm_up + self.steps:
            self.reads.__enter__()
        if self.done == self.warm_up + self.steps + 1:
            self.reads.__exit__(None, None, None)
            self._write(loss())

    def _write(self, loss: float | None) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            seconds = [a.elapsed_time(b) / 1000 for a, b in pairwise(self.marks)]
            memory = {
                "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
                "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
        else:
            seconds = [b - a for a, b in pairwise(self.marks)]
            memory = {}
        step = statistics.median(seconds)
        numbers = {
            "step_seconds": seconds,
            "tokens_per_second": self.facts["tokens_per_step"] / step,
            "flops_per_second": self.facts["flops_per_step"] / step,
            "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
            "reads_per_step": self.reads.total,
            "loss": loss,
        }
        self.result.write_text(json.dumps({**self.facts, **numbers, **memory}))
        os._exit(0)  # skip the rest of the run, such as the export


def main(order: str, result: str) -> None:
    """Measure the machine's `limits` or the case that the order names, and write the result."""
    asked = json.loads(Path(order).read_text())
    if asked["case"] == "limits":
        Path(result).write_text(json.dumps({"limits": limits(), "environment": describe_environment()}))
        return
    case = Case(**asked["case"] | {"changes": tuple(asked["case"]["changes"])})
    steps = asked["warm_up"] + asked["steps"] + 1
    PEERS[case.peer](case, recipe_of(case, steps, asked["draft"]), Path(result), asked)


def limits() -> dict[str, float]:
    """Return this machine's best rates: matrix products in bf16, and memory copies (counting reads and writes).

    On a CPU without instructions for bf16, the products are in fp32.
    """
    sizes, device = probe.sizes(), distributed.device()
    side = sizes["products"][-1]
    a, b = (torch.randn(side, side, device=device, dtype=probe.dtypes()[0]) for _ in range(2))
    copies = probe.copies()
    found = {
        "matrix_flops": 2 * side**3 / probe.median_seconds(partial(torch.matmul, a, b)),
        "copy_bytes": 2 * sizes["copy"] / copies["copy"],
    }
    return found | ({"from_host_bytes": sizes["copy"] / copies["from_host"]} if "from_host" in copies else {})


def facts(recipe: Recipe, trained: torch.nn.Module, sequences: Dataset, attention: str) -> Json:
    """Return the model, the recipe and the size of a step: tokens without padding, and their operations."""
    tokens, squares = mean_lengths(sequences)
    total, trainable = load.parameter_counts(trained)
    return {
        "model": recipe.name,
        "recipe": to_dict(recipe),
        "config": read_json(config_file(recipe)),
        "attention": attention,
        "parameters": total,
        "trainable": trainable,
        "sequence_length": recipe.sequence_length,
        "sequences_per_step": recipe.global_batch_size,
        "tokens_per_step": tokens * recipe.global_batch_size,
        "flops_per_step": training_flops(trained).of(tokens, squares) * recipe.global_batch_size,
    }


def config_file(recipe: Recipe) -> Path:
    """Return the DeepSpeed file that a recipe names."""
    config = Path(recipe.deepspeed)
    return config if config.is_file() else CONFIGS / config.name


def vocabulary_of(recipe: Recipe, asked: Json) -> int:
    """Return the size of the vocabulary that documents are drawn from."""
    return config_of(recipe, asked["draft"]).get_text_config().vocab_size


def sequences_for(recipe: Recipe, asked: Json) -> object:
    """Return the sequences of eight steps; training repeats them."""
    vocabulary = vocabulary_of(recipe, asked)
    count = 8 * recipe.global_batch_size
    if not recipe.packing:
        alone = documents(recipe, vocabulary, count)
        return alone.add_column("seq_lengths", [[len(tokens)] for tokens in alone["input_ids"]])
    made = documents(recipe, vocabulary, 8 * count)
    packed = pack_dataset(made, recipe.sequence_length, "bfd")
    return packed.shuffle(seed=0)


class Ticks(TrainerCallback):
    """Ticks the clock at every step of a Trainer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Tick."""
        self.clock.step()


def of_recipe(case: Case, recipe: Recipe, result: Path, asked: Json) -> None:
    """Train the recipe through the steps of `run.execute`, on synthetic weights and sequences."""
    sequences, tokenizer = sequences_for(recipe, asked), AutoTokenizer.from_pretrained(TINY_MODEL)
    folder = RunFolder(result.with_suffix(".run"))
    config_of(recipe, asked["draft"]).save_pretrained(folder.draft_model)
    trained = replace(
        recipe,
        deepspeed=str(config_file(recipe)),
        model=replace(recipe.model, path=str(folder.draft_model)),
    )
    write_recipe(folder, trained)
    file = deepspeed_file.read(trained.deepspeed)

    distributed.start()
    trained = run.checked(trained, file, tokenizer)
    arguments = sft.arguments(common_arguments(trained, folder, file, 1, distributed.on_gpu()), trained)
    model = load.adapted(transforms.apply(random_model(trained, asked["draft"]), trained), trained)
    gather_layers(arguments, model, file)
    upstream.tell_whether_packed(model, trained.packing)
    data = Datasets(sequences, None, None, [])
    context = run.prepare(trained, folder, file, data, model, None, {}, Trackers(folder))
    trainer = sft.trainer(context, Parts(model, arguments, sequences, tokenizer))
    attention = model.config.get_text_config()._attn_implementation
    trainer.add_callback(Ticks(Clock(result, asked, facts(recipe, model, sequences, attention))))
    trainer.train()


def of_plain_loop(case: Case, recipe: Recipe, result: Path, asked: Json) -> None:
    """Train with a typical fast loop: no DeepSpeed, a causal mask over whole sequences, fused AdamW.

    Packed documents attend to each other here, since the loop has no mask between them.
    """
    sequences = sequences_for(recipe, asked)
    trained = random_model(recipe, asked["draft"]).train()
    if recipe.lora:
        trained = adapters.add(trained, recipe.lora)
    upstream.tell_whether_packed(trained, packed=False)  # a compiled model would build a dense mask regardless
    if recipe.gradient_checkpointing:
        trained.gradient_checkpointing_enable({"use_reentrant": False})
    watch = Clock(result, asked, facts(recipe, trained, sequences, "sdpa"))
    weights = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    masters = [weight.detach().float().requires_grad_() for weight in weights] if case.states == "fp32" else weights
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    forward = torch.compile(trained) if case.compiled and not asked["draft"] else trained
    device = trained.device
    loader = DataLoader(sequences, recipe.global_batch_size, shuffle=True, drop_last=True, collate_fn=Collator(0))
    while True:
        for batch in loader:
            inputs = {name: batch[name].to(device, non_blocking=True) for name in ("input_ids", "labels")}
            loss = forward(**inputs, use_cache=False).loss
            loss.backward()
            for weight, master in zip(weights, masters, strict=True):
                if master is not weight:
                    master.grad, weight.grad = weight.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if masters is not weights:
                with torch.no_grad():
                    torch._foreach_copy_(weights, masters)
            watch.step(loss.item if watch.done > watch.warm_up + watch.steps - 1 else lambda: None)


def adapter_of(recipe: Recipe) -> LoraConfig | None:
    """Return PEFT's adapters for all linear layers, with its defaults, or None for training all weights."""
    return LoraConfig(r=recipe.lora.rank, target_modules="all-linear", task_type="CAUSAL_LM") if recipe.lora else None


def of_peers(recipe: Recipe, result: Path, batch: int) -> Json:
    """Return the arguments that both of Hugging Face's trainers get, in addition to their defaults."""
    return {
        "output_dir": str(result.parent / "trainer"),
        "per_device_train_batch_size": batch,
        "max_steps": recipe.max_steps,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def of_trainer(case: Case, recipe: Recipe, result: Path, asked: Json) -> None:
    """Train with `transformers.Trainer`'s defaults: fp32 weights under autocast, a dense mask for packed sequences."""
    sequences = sequences_for(recipe, asked)
    trained = random_model(recipe, asked["draft"], None if recipe.lora else torch.float32)
    if adapter := adapter_of(recipe):
        trained = get_peft_model(trained, adapter)
    arguments = TrainingArguments(
        **of_peers(recipe, result, recipe.global_batch_size), bf16=True, remove_unused_columns=False
    )
    collate = Collator(0)

    def model_inputs(chosen: Any) -> Json:
        batch = collate(chosen)
        return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}

    ticks = Ticks(Clock(result, asked, facts(recipe, trained, sequences, "sdpa")))
    Trainer(
        model=trained, args=arguments, train_dataset=sequences, data_collator=model_inputs, callbacks=[ticks]
    ).train()


def of_sft_trainer(case: Case, recipe: Recipe, result: Path, asked: Json) -> None:
    """Train with TRL's `SFTTrainer`'s defaults, which do not pack: about as many tokens per step, padded."""
    from trl import SFTConfig, SFTTrainer

    alone = documents(recipe, vocabulary_of(recipe, asked), 64 * recipe.global_batch_size)
    lengths = alone.add_column("seq_lengths", [[len(tokens)] for tokens in alone["input_ids"]])
    tokens, _ = mean_lengths(lengths)
    batch = max(1, round(recipe.global_batch_size * recipe.sequence_length / tokens))
    trained = random_model(recipe, asked["draft"], None if recipe.lora else torch.float32)
    described = facts(recipe, trained, lengths, "sdpa")
    adapter = adapter_of(recipe)
    described |= {
        name: described[name] * batch / recipe.global_batch_size for name in ("tokens_per_step", "flops_per_step")
    }
    arguments = SFTConfig(**of_peers(recipe, result, batch), max_length=recipe.sequence_length)
    trainer = SFTTrainer(
        model=trained,
        args=arguments,
        train_dataset=alone,
        processing_class=AutoTokenizer.from_pretrained(TINY_MODEL),
        peft_config=adapter,
        callbacks=[Ticks(Clock(result, asked, described))],
    )
    if adapter:
        work = training_flops(trainer.model.get_base_model())
        ticks = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Ticks))
        tokens, squares = mean_lengths(lengths)
        ticks.clock.facts["flops_per_step"] = work.of(tokens, squares) * batch
    trainer.train()


PEERS = {"recipe": of_recipe, "plain": of_plain_loop, "trainer": of_trainer, "sft_trainer": of_sft_trainer}


if __name__ == "__main__":
    main(*sys.argv[1:])
