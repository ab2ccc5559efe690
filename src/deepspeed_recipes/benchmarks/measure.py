"""Run one contender once, as a process: `python -m deepspeed_recipes.benchmarks.measure ORDER.json RESULT.json`."""

from ..training import peft_without_bitsandbytes  # noqa: F401, I001  # first: before anything imports PEFT

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..recipe import deepspeed_file
from ..recipe.project import CONFIGS
from ..recipe.conversions import to_dict
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder, read_json, write_recipe
from ..training import distributed, run, upstream
from ..training.arguments import common_arguments, gather_layers
from ..training.data.collate import Collator
from ..training.data.load import Datasets
from ..training.environment import describe
from ..training.methods import sft
from ..training.model import lora as adapters
from ..training.model import load, transforms
from ..training.callbacks.metrics import training_flops
from ..training.tracking.trackers import Trackers
from . import probe, synthetic
from .cases import Case, recipe_of
from .clock import Clock


def main(order: str, result: str) -> None:
    """Measure the machine's `limits` or the case that the order names, and write the result."""
    asked = json.loads(Path(order).read_text())
    if asked["case"] == "limits":
        Path(result).write_text(json.dumps({"limits": limits(), "environment": describe()}))
        return
    case = Case(**asked["case"] | {"changes": tuple(asked["case"]["changes"])})
    steps = asked["warm_up"] + asked["steps"] + 1
    PEERS[case.peer](case, recipe_of(case, steps, asked["draft"]), Path(result), asked)


def limits() -> dict[str, float]:
    """Return this machine's best rates: bf16 matrix products, and memory copies (counting reads and writes)."""
    sizes, device = probe.sizes(), distributed.device()
    side = sizes["products"][-1]
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    copies = probe.copies()
    found = {
        "matrix_flops": 2 * side**3 / probe.median_seconds(partial(torch.matmul, a, b)),
        "copy_bytes": 2 * sizes["copy"] / copies["copy"],
    }
    return found | ({"from_host_bytes": sizes["copy"] / copies["from_host"]} if "from_host" in copies else {})


def facts(recipe: Recipe, trained: torch.nn.Module, sequences: Any, attention: str) -> dict[str, Any]:
    """Return the model, the recipe and the size of a step: tokens without padding, and their operations."""
    tokens, squares = synthetic.mean_lengths(sequences)
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


def clock(result: Path, asked: dict[str, Any], described: dict[str, Any]) -> Clock:
    """Return the clock of a run."""
    return Clock(result, asked["warm_up"], asked["steps"], described)


def vocabulary_of(recipe: Recipe, asked: dict[str, Any]) -> int:
    """Return the size of the vocabulary that documents are drawn from."""
    return synthetic.config_of(recipe, asked["draft"]).get_text_config().vocab_size


def sequences_for(recipe: Recipe, asked: dict[str, Any]) -> Any:
    """Return the sequences of eight steps; training repeats them."""
    return synthetic.sequences_of(recipe, vocabulary_of(recipe, asked), 8 * recipe.global_batch_size)


class Ticks(TrainerCallback):
    """Ticks the clock at every step of a Trainer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tick."""
        self.clock.step()


def of_recipe(case: Case, recipe: Recipe, result: Path, asked: dict[str, Any]) -> None:
    """Train the recipe through the steps of `run.execute`, on synthetic weights and sequences."""
    sequences, tokenizer = sequences_for(recipe, asked), synthetic.tokenizer()
    folder = RunFolder(result.with_suffix(".run"))
    synthetic.config_of(recipe, asked["draft"]).save_pretrained(folder.draft_model)
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
    model = load.adapted(transforms.apply(synthetic.random_model(trained, asked["draft"]), trained), trained)
    gather_layers(arguments, model, file)
    upstream.tell_whether_packed(model, trained.packing)
    data = Datasets(sequences, None, None, [])
    context = run.prepare(trained, folder, file, data, model, None, {}, Trackers(folder))
    trainer = sft.trainer(context, model, arguments, sequences, tokenizer)
    attention = model.config.get_text_config()._attn_implementation
    trainer.add_callback(Ticks(clock(result, asked, facts(recipe, model, sequences, attention))))
    trainer.train()


def of_plain_loop(case: Case, recipe: Recipe, result: Path, asked: dict[str, Any]) -> None:
    """Train with a typical fast loop: no DeepSpeed, a causal mask over whole sequences, fused AdamW.

    Packed documents attend to each other here, since the loop has no mask between them.
    """
    sequences = sequences_for(recipe, asked)
    trained = synthetic.random_model(recipe, asked["draft"]).train()
    if recipe.lora:
        trained = adapters.add(trained, recipe.lora)
    upstream.tell_whether_packed(trained, packed=False)  # a compiled model would build a dense mask regardless
    if recipe.gradient_checkpointing:
        trained.gradient_checkpointing_enable({"use_reentrant": False})
    watch = clock(result, asked, facts(recipe, trained, sequences, "sdpa"))
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


def of_trainer(case: Case, recipe: Recipe, result: Path, asked: dict[str, Any]) -> None:
    """Train with `transformers.Trainer`'s defaults: fp32 weights under autocast, a dense mask for packed sequences."""
    sequences = sequences_for(recipe, asked)
    trained = synthetic.random_model(recipe, asked["draft"], None if recipe.lora else torch.float32)
    if recipe.lora:
        trained = get_peft_model(
            trained, LoraConfig(r=recipe.lora.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    arguments = TrainingArguments(
        output_dir=str(result.parent / "trainer"),
        per_device_train_batch_size=recipe.global_batch_size,
        max_steps=recipe.max_steps,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collate = Collator(0)

    def model_inputs(chosen: Any) -> dict[str, Any]:
        batch = collate(chosen)
        return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}

    ticks = Ticks(clock(result, asked, facts(recipe, trained, sequences, "sdpa")))
    Trainer(
        model=trained, args=arguments, train_dataset=sequences, data_collator=model_inputs, callbacks=[ticks]
    ).train()


def of_sft_trainer(case: Case, recipe: Recipe, result: Path, asked: dict[str, Any]) -> None:
    """Train with TRL's `SFTTrainer`'s defaults, which do not pack: about as many tokens per step, padded."""
    from trl import SFTConfig, SFTTrainer

    alone = synthetic.documents(recipe, vocabulary_of(recipe, asked), 64 * recipe.global_batch_size)
    lengths = alone.add_column("seq_lengths", [[len(tokens)] for tokens in alone["input_ids"]])
    tokens, _ = synthetic.mean_lengths(lengths)
    batch = max(1, round(recipe.global_batch_size * recipe.sequence_length / tokens))
    trained = synthetic.random_model(recipe, asked["draft"], None if recipe.lora else torch.float32)
    described = facts(recipe, trained, lengths, "sdpa")
    adapter = (
        LoraConfig(r=recipe.lora.rank, target_modules="all-linear", task_type="CAUSAL_LM") if recipe.lora else None
    )
    described |= {
        name: described[name] * batch / recipe.global_batch_size for name in ("tokens_per_step", "flops_per_step")
    }
    arguments = SFTConfig(
        output_dir=str(result.parent / "trainer"),
        per_device_train_batch_size=batch,
        max_steps=recipe.max_steps,
        max_length=recipe.sequence_length,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=trained,
        args=arguments,
        train_dataset=alone,
        processing_class=synthetic.tokenizer(),
        peft_config=adapter,
        callbacks=[Ticks(clock(result, asked, described))],
    )
    if adapter:
        work = training_flops(trainer.model.get_base_model())
        ticks = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Ticks))
        tokens, squares = synthetic.mean_lengths(lengths)
        ticks.clock.facts["flops_per_step"] = work.of(tokens, squares) * batch
    trainer.train()


PEERS = {"recipe": of_recipe, "plain": of_plain_loop, "trainer": of_trainer, "sft_trainer": of_sft_trainer}

if __name__ == "__main__":
    main(*sys.argv[1:])
