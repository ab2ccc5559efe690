"""Runs configs that load but then fail or do something else, one after another, and records what happened.

usage: run_configs.py OUTPUT, with the cases as JSON on standard input: [[name, kind, config], ...]

A kind is "plain", "own optimizer" (plain too, with torch's AdamW also where the optimizer is offloaded) or "trainer".
"""

import gc
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import deepspeed  # noqa: E402
import torch  # noqa: E402


def plain(config: dict, own_optimizer: bool = False) -> dict:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    own = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=0.01)
    if own and not own_optimizer and (config.get("zero_optimization") or {}).get("offload_optimizer"):
        own = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=0.01)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=own, model_parameters=model.parameters(), config=config
    )
    for _ in range(2):
        dtype = next(engine.parameters()).dtype
        loss = engine(torch.ones(1, 8, dtype=dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return {
        "stage": engine.zero_optimization_stage(),
        "optimizer": type(engine.optimizer).__name__,
        "basic": type(engine.basic_optimizer).__name__,
        "clipping": engine.gradient_clipping(),
        "dtype": str(dtype),
        "postscale": engine.postscale_gradients(),
        "partitioned": any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()),
        "offloaded": bool(getattr(engine.optimizer, "cpu_offload", False)),
        "scheduler": type(scheduler).__name__,
        "files": sum(1 for item in Path("swap").rglob("*") if item.is_file()) if Path("swap").exists() else 0,
    }


def trainer(config: dict | str) -> dict:
    """`config` may be the text of a file, for what no dictionary can hold."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    file = Path("config.json")
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    arguments = TrainingArguments(
        output_dir="output",
        deepspeed=str(file),
        use_cpu=True,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=1,
        max_grad_norm=0.25,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        optim="adafactor",
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=0.01,
    )
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    dimensions = AutoConfig.for_model("llama", num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(dimensions)
    data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
    run = Trainer(model, arguments, train_dataset=data, data_collator=default_data_collator)
    run.train()
    engine = run.model_wrapped
    return {
        "clipping": engine.gradient_clipping(),
        "basic": type(engine.basic_optimizer).__name__,
        "decays": sorted({group["weight_decay"] for group in engine.basic_optimizer.param_groups}),
        "rates": [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry],
        "accumulation": engine.gradient_accumulation_steps(),
    }


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState
    from deepspeed.runtime.zero import partition_parameters
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    gc.collect()
    unset_hf_deepspeed_config()
    partition_parameters.shutdown_init_context()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def main() -> int:
    deepspeed.init_distributed(dist_backend="gloo")
    results = {}
    for name, kind, config in json.load(sys.stdin):
        try:
            results[name] = trainer(config) if kind == "trainer" else plain(config, kind == "own optimizer")
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        forget()
        Path(sys.argv[1]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
