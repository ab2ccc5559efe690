"""Trains with a template for two real optimizer steps and writes what the engine was, as JSON, on rank 0.

usage (under a launcher): use_config.py accelerate|trainer FOLDER TEMPLATE...
"""

import importlib
import json
import math
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.ops.op_builder.builder import OpBuilder  # noqa: E402
from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder  # noqa: E402
from deepspeed.utils import groups  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 3e-4,
    "weight_decay": 0.02,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
    "use_cpu": not torch.cuda.is_available(),
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# NVMe swaps nothing smaller than one aio block (1 MiB), so its model must be wider.
WIDE = {**DENSE, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# What a template needs beside its JSON; configs/README.md says the same.
NEEDS_EXPERTS = ("zero3_moe", "expert_parallel")


def dimensions(name: str) -> dict:
    if name == "zero3_nvme":
        return WIDE
    return EXPERTS if name in NEEDS_EXPERTS else DENSE


def rows(count: int = 64, length: int = 16) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 128, (count, length), generator=generator)
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens]


def with_trainer(name: str, template: Path | None, kind: str) -> dict:
    """Train with transformers.Trainer or TRL's SFTTrainer, both of which take the template as it is."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, default_data_collator

    extra = {"deepspeed": str(template)} if template else {}
    if name == "sequence_parallel":
        from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length=16, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
        extra["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    precision = {"fp16": name == "fp16", "bf16": name != "fp16", "torch_compile": name == "deepcompile"}
    output = {"output_dir": "output", **SETTINGS, **precision, **extra}
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**output, max_length=16, gradient_checkpointing=False)
        model = build(name)
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_list(rows()), processing_class=tokenizer()
        )
    else:
        variant = template.stem.partition("-")[2] if template else ""
        if variant == "pretrained":  # saved before the arguments, that is, before zero.Init is live
            if deepspeed.comm.get_rank() == 0:
                build(name).save_pretrained("saved")
            deepspeed.comm.barrier()
        arguments = TrainingArguments(**output)
        model = build(name, adapters=variant == "lora", checkpoint=variant == "pretrained")
        data = rows()
        if name == "sequence_parallel":
            data = [{**row, "position_ids": list(range(16))} for row in data]
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=default_data_collator)
    result = trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    seen = {**observe(trainer.model_wrapped, name), "grad_norm": norms}
    config = dict(trainer.model_wrapped.config)
    return {**seen, "loss": result.training_loss, "config": config, "world": arguments.world_size}


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(126)}
    bare = Tokenizer(models.WordLevel({**words, "<pad>": 126, "<eos>": 127}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>")


def build(name: str, adapters: bool = False, checkpoint: bool = False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**dimensions(name))
    if checkpoint:
        return AutoModelForCausalLM.from_pretrained("saved", attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if adapters:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def with_plain(name: str, template: Path) -> dict:
    """Train with deepspeed.initialize on the resolved template: no transformers.Trainer anywhere."""
    from deepspeed_recipes.config.resolve import Numbers, resolve

    stages = 2 if name == "pipeline" else 1
    numbers = Numbers(
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        world_size=2,
        pipeline=stages,
        sequence=2 if name == "sequence_parallel" else 1,
        hidden_size=dimensions(name)["hidden_size"],
        precision="bf16",
        learning_rate=3e-4,
    )
    config = resolve(json.loads(template.read_text()), numbers)
    if name == "pipeline":
        return with_pipeline(name, config)
    model = build(name)
    optimizer = None if "optimizer" in config else adam(model, config)
    mpu = ulysses(model) if name == "sequence_parallel" else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config, mpu=mpu
    )
    for batch in plain_batches(name):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    return {**observe(engine, name), "loss": loss.item(), "config": config, "world": world()}


def plain_batches(name: str) -> list[dict]:
    """Return four micro batches (eight for ZenFlow, which steps every fourth): this rank's part."""
    ids = torch.tensor([row["input_ids"] for row in rows(32)])
    rank = deepspeed.comm.get_rank()
    batches = []
    for step in range(8 if name == "zenflow" else 4):
        start = 4 * step if name in ("tensor_parallel", "sequence_parallel") else 4 * step + 2 * rank
        batch = {"input_ids": ids[start : start + 2], "labels": ids[start : start + 2]}
        if name == "sequence_parallel":
            batch["position_ids"] = torch.arange(16).repeat(2, 1)
            batch = {key: value[:, 8 * rank : 8 * rank + 8].contiguous() for key, value in batch.items()}
        batches.append(batch)
    return batches


def ulysses(model):
    """Return the sequence-parallel grid that deepspeed.initialize needs as `mpu`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        seq_length=16,
        seq_length_is_variable=True,
        micro_batch_size=2,
    )


def world() -> int:
    return deepspeed.comm.get_world_size()


def adam(model, config: dict):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    offload = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    kind = torch.optim.AdamW if offload == "none" else DeepSpeedCPUAdam
    return kind(model.parameters(), lr=3e-4)


def with_pipeline(name: str, config: dict) -> dict:
    """Two stages over unmodified Hugging Face layers."""
    from deepspeed.pipe import PipelineModule

    model = build(name)
    rotary = model.model.rotary_emb

    class Block(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden):
            positions = torch.arange(hidden.shape[1])[None]
            return self.layer(hidden, position_embeddings=rotary(hidden, positions), position_ids=positions)

    layers = [model.model.embed_tokens, *map(Block, model.model.layers), model.model.norm, model.lm_head]
    module = PipelineModule(layers, num_stages=2, loss_fn=shifted, partition_method="uniform")
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    ids = torch.tensor([row["input_ids"] for row in rows(8)])
    batches = iter([(ids[at : at + 2], ids[at : at + 2]) for at in (0, 2, 4, 6)])
    for _ in range(2):
        loss = engine.train_batch(batches)
    seen = {**observe(engine, name), "stages": engine.num_stages}
    return {**seen, "loss": loss.item(), "config": config, "world": world()}


def shifted(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def observe(engine, name: str) -> dict:
    """Return what the engine really is, read from its objects and not from its config."""
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    parameters = list(engine.module.parameters())
    shards = [
        p.ds_tensor.ds_numel if hasattr(p.ds_tensor, "ds_numel") else p.ds_tensor.numel()
        for p in parameters
        if hasattr(p, "ds_tensor")
    ]
    states = [value for state in basic.state.values() for value in state.values() if torch.is_tensor(value)]
    swapped = sum(file.stat().st_size for file in Path("nvme_offload").rglob("*") if file.is_file())
    return {
        "engine": type(engine).__name__,
        "engine_world": engine.world_size,
        "stage": engine.zero_optimization_stage(),
        "optimizer": type(optimizer).__name__,
        "basic": type(basic).__name__,
        "groups": sorted({group["weight_decay"] for group in basic.param_groups}),
        "steps": engine.global_steps,
        "clipping": engine.gradient_clipping(),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "sharded": sum(shards),
        "persistent": sum(p.ds_numel for p in parameters if getattr(p, "ds_persist", False)),
        "hpz": group_size(groups._get_zero_param_intra_parallel_group()),
        "offload_optimizer": bool(getattr(optimizer, "cpu_offload", getattr(optimizer, "offload_optimizer", False))),
        "offload_param": bool(getattr(optimizer, "offload_param", False)),
        "nvme_bytes": swapped,
        "state_dtypes": sorted({str(value.dtype) for value in states if value.numel() > 1}),
        "accumulates": str(engine.get_data_types()[1]),
        "leaves": sum(bool(getattr(module, "_z3_leaf", False)) for module in engine.module.modules()),
        "tensor": engine.autotp_size(),
        "sequence": groups._get_sequence_parallel_world_size(),
        "q_proj": next((list(p.shape) for n, p in engine.module.named_parameters() if "q_proj.weight" in n), None),
        "zenflow": bool(getattr(engine, "zenflow", False)),
        "experts": sum(type(module).__name__ == "AutoEPMoELayer" for module in engine.module.modules()),
        "kinds": sorted({type(module).__name__ for module in engine.module.modules()}),
    }


def group_size(group) -> int:
    return 1 if group is None else deepspeed.comm.get_world_size(group=group)


def record_ops() -> set[str]:
    """Return a set that holds, from now on, the names of the C++ ops that DeepSpeed has asked for."""
    asked: set[str] = set()

    def recorded(load):
        def ask(builder: OpBuilder, *arguments, **options):
            asked.add(builder.name)
            return load(builder, *arguments, **options)

        return ask

    for kind in (OpBuilder, PinMemoryBuilder):
        kind.load = recorded(kind.load)
    return asked


def use(mode: str, template: str, folder: str) -> None:
    """Train in `folder` with the template; `mode` is trainer, sft, accelerate or plain.

    What follows one run in a process is not a new beginning (groups, patches, singletons), so this is called once.
    """
    asked = record_ops()
    path, rank = Path(template).resolve(), int(os.environ["RANK"])
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
    backend = "gloo" if SETTINGS["use_cpu"] else "nccl"
    torch.distributed.init_process_group(backend, **where)
    deepspeed.init_distributed(dist_backend=backend)
    # DeepSpeed's CPU all-reduce through shared memory ignores its group: wrong where a group is not the whole world.
    deepspeed.comm.comm.cdb.shm_vector_kernel_level = 0
    name = path.stem.partition("-")[0]  # `zero3-variant.json` is built and fed like zero3
    try:
        if mode == "accelerate":
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)  # what accelerate launch exports
            seen = with_trainer(name, None, "trainer")
        elif mode == "plain":
            seen = with_plain(name, path)
        else:
            seen = with_trainer(name, path, mode)
        seen["finite"] = math.isfinite(seen["loss"])
        seen["ops"] = sorted(asked)
    except Exception as error:
        seen = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    if rank == 0:
        Path("seen.json").write_text(json.dumps(seen, default=str))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    mode, folder, *templates = sys.argv[1:]
    if len(templates) > 1:  # a process for each, and the imports once
        importlib.import_module("tests.preload")
    for template in templates:
        child = os.fork() if len(templates) > 1 else 0  # CUDA does not survive a fork
        if not child:
            use(mode, template, f"{folder}/{Path(template).stem}")
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
