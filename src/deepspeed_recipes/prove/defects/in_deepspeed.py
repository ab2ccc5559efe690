"""Defects that show in DeepSpeed alone: `torchrun --nproc_per_node RANKS in_deepspeed.py NAME` runs one."""

import argparse
import os
import sys
import tempfile

import deepspeed
import torch
from deepspeed import DeepSpeedEngine, comm
from deepspeed.checkpoint import ds_to_universal
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import safe_get_full_fp32_param
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

try:
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
except ImportError:  # before 0.19.2
    AutoEPMoELayer = None

RANKS = {
    "auto_values": 1,
    "autoep_router": 2,
    "autotp_adapters": 2,
    "evaluation_first": 2,
    "expert_gradient_norm": 2,
    "gradient_norm": 1,
    "pipeline_accumulation": 2,
    "rotary_frequencies": 1,
    "round_robin_order": 2,
    "shared_memory_group": 4,
    "step_of_zeros": 1,
    "universal_checkpoint_groups": 1,
}
ONLY = {"shared_memory_group": "cpu"}
RIGHT_SINCE = {"pipeline_accumulation": "0.19.3"}


def auto_values() -> tuple[bool, str]:
    """Outside transformers, "auto" in a DeepSpeed configuration silently becomes a default: no ZeRO, fp32.

    DeepSpeed drops every value that is "auto" before it validates a section. A configuration written for the Trainer
    loads in `deepspeed.initialize`, and trains without ZeRO and in another precision. A key that is misspelled at the
    top level is ignored in the same way.
    """
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"},
        "gradient_cliping": 0.1,
    }  # fmt: skip
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
    except Exception as error:
        return False, f"refused: {type(error).__name__}: {error}"[:200]
    found = f"stage {engine.zero_optimization_stage()}, bf16 {bool(engine.bfloat16_enabled())}"
    return (
        True,
        f'stage "auto", bf16 "auto" and gradient_cliping 0.1 became {found}, clipping {engine.gradient_clipping()}',
    )


def autoep_router() -> tuple[bool, str]:
    """AutoEP routes tokens of DeepSeek's models in bf16, where transformers routes in fp32.

    DeepSpeed's expert parallelism multiplies by the router's weights in the weights' dtype. A token near a decision
    boundary then goes to other experts than in transformers, so the results of training and of all later use disagree.
    """
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 48,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "initializer_range": 0.2,
    }  # fmt: skip

    def model() -> PreTrainedModel:
        """Return the same DeepSeek-V3 each time."""
        torch.manual_seed(0)
        config = AutoConfig.for_model("deepseek_v3", **sizes, norm_topk_prob=True, routed_scaling_factor=2.5)
        return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()

    if AutoEPMoELayer is None:
        return False, f"DeepSpeed {deepspeed.__version__} has no AutoEP"
    deepspeed.init_distributed(verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }  # fmt: skip
    split = model()
    engine, *_ = deepspeed.initialize(model=split, model_parameters=split.parameters(), config=config)
    engine.eval()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1)).to(engine.device)
    with torch.no_grad():
        found = engine(tokens).logits
        for layer in split.modules():
            if isinstance(layer, AutoEPMoELayer):
                gate = layer.router.gate
                gate.forward = lambda hidden, gate=gate: torch.nn.functional.linear(hidden.float(), gate.weight.float())
        expected = engine(tokens).logits
    apart = (found - expected).abs().amax(-1) / expected.abs().max()
    changed = (apart > 1e-3).sum().item()
    return (
        changed > 0,
        f"{changed} of {tokens.numel()} tokens get other logits, up to {apart.max().item():.1%} of the largest",
    )


def autotp_adapters() -> tuple[bool, str]:
    """AutoTP replaces adapters: a model with LoRA that is split over two ranks has no adapters left.

    DeepSpeed's AutoTP splits PEFT's layers as if they were linear layers, so the weights to train are lost. Training
    then fails with an error that does not mention the reason, or does not fail.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=64))
    model = get_peft_model(whole, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    before = sum(isinstance(module, LoraLayer) for module in model.modules())
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": 2},
    }  # fmt: skip
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except Exception as error:
        return True, f"{before} layers with adapters; {type(error).__name__}: {error}"[:200]
    after = sum(isinstance(module, LoraLayer) for module in engine.module.modules())
    return after < before, f"{before} layers with adapters, {after} after AutoTP"


def evaluation_first() -> tuple[bool, str]:
    """After an evaluation, ZeRO-3 permanently gathers all weights twice in every training step.

    For each module and position DeepSpeed decides once which weights stay gathered between the forward and the backward
    pass, and caches the decision. An evaluation has no backward pass, so its decision is to keep none, and the training
    steps after it use that decision: they communicate twice as much as without the evaluation.
    """

    def gathers(evaluations: int) -> int:
        """Return the number of gathers in a training step after `evaluations` evaluations."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)])
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        inputs = torch.ones(1, 64, device=engine.device)
        with torch.no_grad():
            engine.eval()
            for _ in range(evaluations):
                engine(inputs)
            engine.train()
        for _ in range(5):
            with torch.profiler.profile(acc_events=True) as trace:
                engine.backward(engine(inputs).square().mean())
                engine.step()
        return sum(event.name == "c10d::_allgather_base_" for event in trace.events())

    deepspeed.init_distributed(verbose=False)
    usual, afterwards = gathers(evaluations=0), gathers(evaluations=4)
    return afterwards > usual, f"{usual} gathers in a training step, {afterwards} after an evaluation"


def expert_gradient_norm() -> tuple[bool, str]:
    """DeepSpeed's clip_grad_norm_ averages the norms of different experts instead of adding them up.

    With experts on different ranks, and without ZeRO, each rank has gradients of its own experts. Their common norm is
    the root of the sum of squares; DeepSpeed takes the mean over the ranks, and clips at that.
    """
    deepspeed.init_distributed(verbose=False)
    device = deepspeed.accelerator.get_accelerator().device_name(int(os.environ["LOCAL_RANK"]))
    expert = torch.nn.Parameter(torch.zeros(1, device=device))
    expert.grad = torch.tensor([3.0 + torch.distributed.get_rank()], device=device)
    expert.allreduce = False  # DeepSpeed's mark of a weight that only this rank has
    norm = float(clip_grad_norm_([expert], max_norm=10.0))
    return abs(norm - 5) > 0.01, f"the gradients of two experts are 3 and 4; DeepSpeed reports the norm {norm:.2f}"


def gradient_norm() -> tuple[bool, str]:
    """Without ZeRO, in fp32, the engine discards the gradient norm by which it clips.

    `DeepSpeedEngine.clip_fp32_gradients` drops the result of `clip_grad_norm_`, so `get_global_grad_norm()` is None,
    and programs that log it (such as transformers' Trainer) log nothing. With bf16, fp16 or ZeRO 1 to 3 the norm is
    kept.
    """
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Linear(4, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    return norm is None, f"get_global_grad_norm() is {norm} after a step whose gradient is [1, 1, 1, 1, 1]"


def pipeline_accumulation() -> tuple[bool, str]:
    """Gradients of a pipeline's earlier stages are divided by the accumulation steps once per stage.

    With `gradient_accumulation_steps` of 2 and two stages, the first stage's gradients are half of the correct size;
    with three stages, a quarter. Adam hides the size, but not the stages' shares in the gradient norm that clipping
    uses. The loss looks normal. Fixed in DeepSpeed 0.19.3.
    """
    accumulation = 2

    def layers() -> list[torch.nn.Module]:
        """Return the same layers each time."""
        torch.manual_seed(0)
        return [torch.nn.Linear(4, 4) for _ in range(2)]

    deepspeed.init_distributed(verbose=False)
    device = deepspeed.accelerator.get_accelerator().device_name(int(os.environ["LOCAL_RANK"]))
    batches = [(torch.full((1, 4), 1.0 + at, device=device), torch.zeros(1, 4, device=device)) for at in range(2)]
    plain = torch.nn.Sequential(*layers()).to(device)
    sum(torch.nn.functional.mse_loss(plain(inputs), targets) / accumulation for inputs, targets in batches).backward()
    expected = plain[0].weight.grad.norm()
    staged = PipelineModule(layers(), num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    before = [weight.detach().clone().to(device) for weight in staged.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1e9,  # the default clips at 1
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.SGD(staged.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=staged, optimizer=optimizer, config=config)
    engine.train_batch(iter(batches))
    moved = (before[0] - next(engine.module.parameters())).norm().reshape(1)
    torch.distributed.broadcast(moved, 0)
    share = (moved / expected).item()
    return abs(share - 1) > 0.01, f"the first of two stages moves by {share:.2f} of its gradient"


def rotary_frequencies() -> tuple[bool, str]:
    """zero.Init rounds the rotary frequencies of a model that is built in bf16.

    `deepspeed.zero.Init` casts every floating-point tensor that is created while a model is built, buffers included.
    transformers keeps `inv_freq` in fp32 on purpose: in bf16 a frequency is off by up to 0.4 %, which at position 1,000
    is radians. Such a model trains at other positions than later loads of its weights compute; the loss looks normal.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    deepspeed.init_distributed(verbose=False)
    config = LlamaConfig(**sizes, vocab_size=64, dtype="bfloat16")
    expected = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        found = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    apart = (found.float().cpu() - expected).abs()
    share, radians = (apart / expected).max().item(), 1000 * apart.max().item()
    return share > 1e-4, f"inv_freq in {found.dtype}, off by {share:.2%}: {radians:.1f} radians at position 1,000"


def shared_memory_group() -> tuple[bool, str]:
    """On CPUs an all-reduce for inference ignores its group, and sums over all ranks.

    `deepspeed.comm.inference_all_reduce`, which tensor parallelism uses in its forward pass, uses a shared-memory
    kernel that always spans the whole world. If tensor parallelism is smaller than the world, ranks also get the sum of
    other models' activations, or hang.
    """
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # as DeepSpeed's launcher sets it
    deepspeed.init_distributed(verbose=False)
    groups = [comm.new_group([0, 1]), comm.new_group([2, 3])]
    value = torch.ones(4)
    comm.inference_all_reduce(value, group=groups[distributed.get_rank() // 2])
    return value[0].item() != 2, f"1 summed over a group of two ranks is {value[0].item():g}, in a world of four"


def round_robin_order() -> tuple[bool, str]:
    """With `round_robin_gradients`, ZeRO 1 and 2 take other weights' fp32 copies for a weight's own.

    `_link_all_hp_params` in zero/stage_1_and_2.py passes offsets in the order of the parameters unless some are padded,
    but the flat buffer has them in round-robin order. `safe_get_full_fp32_param` returns another weight, and a
    universal checkpoint holds, and loads, weights under others' names.
    """
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    wrong = [
        name
        for name, weight in engine.module.named_parameters()
        if not torch.equal(safe_get_full_fp32_param(weight), weight.detach())
    ]
    return bool(wrong), f"the fp32 copies of {len(wrong)} of 4 weights are other weights'"


def step_of_zeros() -> tuple[bool, str]:
    """Without ZeRO, in bf16 and fp16, the optimizer makes a step before the first one.

    To allocate the optimizer's states, `initialize_optimizer_states` in fp16/unfused_optimizer.py and in
    fp16/fused_optimizer.py calls `optimizer.step()` with gradients of zero. Adam counts that step: its first updates
    are 0.74, 0.86, 0.91, ... of their correct size, and AdamW decays the weights once more. In fp32 and with ZeRO 1 to
    3 there is no such step.
    """
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    master = optimizer.param_groups[0]["params"][0]
    before = master.detach().clone()
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)).sum())
    engine.step()
    update = (before - master).mean().item()
    return update < 0.09, f"learning rate 0.1: AdamW's first update is {update:.3f} instead of 0.100"


def universal_checkpoint_groups() -> tuple[bool, str]:
    """Under ZeRO-3 a universal checkpoint gives every group of parameters the first group's settings.

    `load_hp_checkpoint_state_from_checkpoint_dir_stage3` copies the first group's hyper-parameters to all groups, so
    norms and biases are decayed from then on; and all states share one tensor that counts the steps, which each of them
    advances.
    """
    numbers = {"num_extract_workers": 1, "num_merge_workers": 1}
    switches = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}

    def engine(universal: bool) -> DeepSpeedEngine:
        """Return an engine with two groups of parameters, of which only the first is decayed."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.LayerNorm(4))
        decayed, exempt = list(model[0].parameters()), list(model[1].parameters())
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
        config = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": universal},
        }  # fmt: skip
        return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)[0]

    deepspeed.init_distributed(verbose=False)
    folder = tempfile.mkdtemp()
    trained = engine(universal=False)
    trained.backward(trained(torch.ones(1, 4, device=trained.device)).square().mean())
    trained.step()
    trained.save_checkpoint(folder, tag="step1")
    paths = {"input_folder": f"{folder}/step1", "output_folder": f"{folder}/step1_universal"}
    ds_to_universal.main(argparse.Namespace(**paths, **numbers, **switches))
    resumed = engine(universal=True)
    resumed.load_checkpoint(folder, tag="step1_universal")
    decays = [group["weight_decay"] for group in resumed.optimizer.optimizer.param_groups]
    return decays != [0.1, 0.0], f"saved with weight decays [0.1, 0.0], loaded with {decays}"


if __name__ == "__main__":
    present, observed = globals()[sys.argv[1]]()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
