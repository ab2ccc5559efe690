"""The defects of libraries that we work around: a test that fails says that its workaround can be removed."""

import inspect
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import timedelta

import deepspeed
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from datasets import Json
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from pandas.io.json import ujson_dumps
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, modeling_layers, modeling_utils
from transformers.integrations import deepspeed as integration

from deepspeed_recipes.machine import ops
from deepspeed_recipes.planning.cost.constants import COUNTS
from deepspeed_recipes.planning.cost.step_time import updated_bytes
from deepspeed_recipes.planning.cost.training_setup import Software, TrainingSetup
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Layout, Lora
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    newest_checkpoint,
    read_json,
    read_jsonl,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import distributed, upstream
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.checkpoint import universal
from deepspeed_recipes.training.model import draft
from tests import ROOT
from tests.launching import train_with
from tests.parity import gate
from tests.ranks import read_logs, run_on
from tests.small import small
from tests.versions import needs
from tests.workers import (
    expert_norm,
    expert_routes,
    held_experts,
    moved_bytes,
    other_schedules,
    saved_inputs,
    split_layers,
    staged_experts,
    universal_groups,
    zero_init,
)
from tests.workers.saved_inputs import HIDDEN, INNER

pytestmark = needs("deepspeed==0.19.8")  # what is wrong there


def test_deepspeed_forgets_the_fp32_gradient_norm():
    """`remember_gradient_norm` in training/upstream.py can go when DeepSpeed keeps what `clip_grad_norm_` returns."""
    source = inspect.getsource(DeepSpeedEngine.clip_fp32_gradients)
    assert "clip_grad_norm_(" in source and "_global_grad_norm" not in source


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}], ids=["absent", "null"])
def test_transformers_needs_an_indexs_metadata(metadata, tmp_path):
    """`reading_any_index` in training/upstream.py can go when transformers reads such an index."""
    index = tmp_path / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"a": "model-00001-of-00001.safetensors"}} | metadata)
    with pytest.raises((KeyError, TypeError)):
        modeling_utils.get_checkpoint_shard_files(str(tmp_path), str(index))


def test_datasets_rounds_the_numbers_of_json_columns():
    """`keep_json_numbers` in training/upstream.py can go when these columns keep numbers."""
    assert "ujson_dumps(" in inspect.getsource(Json.encode_example) and ujson_dumps(1e-12) == "0.0"


def test_zero3_records_conversions_that_it_has_not_used():
    """`keep_used_conversions` in training/upstream.py can go when it records the used ones, as other loading does."""
    assert "_weight_conversions = weight_mapping" in inspect.getsource(integration._load_state_dict_into_zero3_model)


def test_zero3_decides_once_which_weights_it_keeps():
    """`forget_kept_weights` in training/upstream.py can go when this is no cache, or one that a new trace clears."""
    assert hasattr(upstream.kept_weights(), "cache_clear")
    assert "cache_clear" not in inspect.getsource(PartitionedParameterCoordinator)


@pytest.mark.every
def test_deepspeed_averages_the_norms_of_different_experts(ranks, tmp_path):
    """`deepspeed_config` in training/arguments.py can allow ZeRO stage 0 when this norm is the whole one's."""
    ranks.check(expert_norm.main, log=tmp_path / "log")
    said = read_logs(tmp_path / "log")[0]
    assert "the whole 5.0, DeepSpeed 3.5" in said


def _gradient_in_fp16() -> None:
    distributed.start()
    upstream.leave_out_step_of_zeros()
    model = torch.nn.Linear(4, 1, bias=False)
    config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "initial_scale_power": 4}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config | {"zero_allow_untested_optimizer": True}
    )
    engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
    print("scale", engine.optimizer.loss_scale, "gradient", model.weight.grad[0, 0].item(), flush=True)


@pytest.mark.every
@pytest.mark.skipif(not get_accelerator().is_fp16_supported(), reason="this processor has no fp16")
def test_deepspeed_scales_no_loss_in_fp16_without_zero(ranks, tmp_path):
    """A row of recipe/compatibility.toml and the rule `fp16-without-zero` can go when the gradient is the scale."""
    ranks.check(_gradient_in_fp16, world_size=1, log=tmp_path / "log")
    said = re.search(r"scale (\S+) gradient (\S+)", read_logs(tmp_path / "log")[0])
    assert float(said[1]) > 1 and float(said[2]) == 1


@pytest.mark.every
def test_autoep_routes_deepseek_differently(ranks, tmp_path):
    """`route_as_transformers` in training/upstream.py can go when nothing differs before it."""
    ranks.check(expert_routes.main, log=tmp_path / "log")
    said = re.findall(r"differences (\S+) (\S+)", read_logs(tmp_path / "log")[0])
    greedy, *others = [(float(before), float(after)) for before, after in said]
    assert len(others) == len(expert_routes.CASES) - 1
    assert greedy[0] > 0.1 and greedy[1] < 1e-6
    for (_, dtype, _), (before, after) in zip(expert_routes.CASES[1:], others, strict=True):
        assert after < 1e-6
        assert (before > 1e-3) == (dtype == torch.bfloat16)


@pytest.mark.every
@pytest.mark.parametrize(("world_size", "held"), [(2, 1), (1, 0)])
def test_zero3_holds_whole_experts_until_the_backward_pass(world_size, held, ranks, tmp_path):
    """`held_by_autograd` in cost/states.py can go when ZeRO-3 releases what autograd saved slices of."""
    ranks.check(held_experts.main, world_size=world_size, log=tmp_path / "log")
    said = re.search(r"held (\S+) of the experts", read_logs(tmp_path / "log")[0])
    assert float(said[1]) == pytest.approx(held, rel=0.1)


@pytest.mark.every
@pytest.mark.parametrize(("stage", "bf16_states"), [(1, False), (2, False), (3, False), (1, True), (3, True)])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_deepspeed_moves_the_bytes_that_the_planner_counts(stage, bf16_states, fused, world_size, ranks, tmp_path):
    """`updated_bytes`, and `reduction` of planning/counts.toml; a rank's part of the gradients is 8 bytes more."""
    ranks.check(moved_bytes.main, stage, fused, bf16_states, world_size=world_size, log=tmp_path / "log")
    said = re.search(r"step (\S+), backward (\S+) bytes per parameter", read_logs(tmp_path / "log")[0])
    step, backward = (float(number) for number in said.groups())
    software = Software(foreach_adam=not fused)
    setup = TrainingSetup(world_size, zero_stage=stage, software=software, bf16_states=bf16_states)
    assert step * world_size == pytest.approx(updated_bytes(setup), rel=0.05)
    assert COUNTS.reduction - 4 <= backward - 8 / world_size <= COUNTS.reduction + 1, "one rank copies nothing flat"


@pytest.mark.every
@pytest.mark.parametrize(
    ("dropout", "target_modules", "inputs"),
    [(0.0, "all-linear", 0), (0.1, "all-linear", 2 * HIDDEN + INNER), (0.0, "q_proj,v_proj", HIDDEN + INNER)],
)
def test_zero3_saves_the_inputs_of_frozen_matrices(dropout, target_modules, inputs, ranks, tmp_path):
    """`frozen` in cost/activations.py can go when `LinearFunctionForZeroStage3` saves what it needs."""
    ranks.check(saved_inputs.main, dropout, target_modules, world_size=1, log=tmp_path / "log")
    said = re.search(r"more (\S+) bytes", read_logs(tmp_path / "log")[0])
    assert float(said[1]) == pytest.approx(2 * inputs, abs=8)


@pytest.mark.every
def test_zero_init_rounds_the_rotary_frequencies(ranks, tmp_path):
    """`restore_rotary_frequencies` in training/upstream.py can go when `zero.Init` leaves buffers alone."""
    ranks.check(zero_init.main, world_size=1, log=tmp_path / "log")
    said = read_logs(tmp_path / "log")[0]
    assert "rounded to torch.bfloat16" in said and "mended True" in said
    assert 1e-3 < float(re.search(r"off by ([\d.]+)", said)[1]) < 5e-3


@pytest.mark.every
def test_autotp_loses_adapters(ranks, tmp_path):
    """`shard_model` in parallel/tensor.py can leave models with adapters to AutoTP when it keeps them."""
    ranks.check(split_layers.lose_adapters, log=tmp_path / "log")
    assert "14 layers with adapters, 0 after AutoTP" in read_logs(tmp_path / "log")[0]


@pytest.mark.every
def test_autotp_splits_the_head(ranks, tmp_path):
    """`shard_model` in parallel/tensor.py can leave models without adapters to AutoTP when it keeps the head whole."""
    ranks.check(split_layers.split_head, log=tmp_path / "log")
    said = re.search(r"(\d+) rows, (\d+) after AutoTP", read_logs(tmp_path / "log")[0])
    assert int(said[2]) == int(said[1]) // 2


@pytest.mark.every
def test_peft_imports_bitsandbytes():
    """training/peft_without_bitsandbytes.py can go when `import peft` leaves bitsandbytes alone."""
    for code, expected in (("import peft", True), ("import deepspeed_recipes.training.run", False)):
        code += f"; import sys; assert ('bitsandbytes' in sys.modules) is {expected}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_safetensors_writes_for_the_owner_alone(tmp_path):
    """`write_safetensors_for_the_umask` can go when the library's own function keeps to the umask."""
    umask = os.umask(0o027)
    try:
        save_file({"a": torch.ones(2)}, tmp_path / "ours")
        inspect.unwrap(safetensors.torch.serialize_file)({}, tmp_path / "theirs")
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "theirs")]
    assert modes == [0o640, 0o600]


def test_bitsandbytes_repacks_on_the_cpu():
    """`keep_4bit_layout` in training/upstream.py can go when 4-bit layers keep their bytes in evaluation."""
    source = inspect.getsource(Linear4bit.forward)
    assert "support_avx512bf16_for_cpu" in source and "_convert_weight_packed_for_cpu(" in source
    layer = Linear4bit(64, 48, bias=False, compute_dtype=torch.bfloat16)
    upstream.keep_4bit_layout(layer)
    assert layer.support_avx512bf16_for_cpu is False


@pytest.mark.every
def test_zero3_forgets_the_groups_of_a_universal_checkpoint(ranks, tmp_path, model_folder, conversations):
    """`separate_step_counters` in training/upstream.py can go when every loaded state has a counter of its own."""
    recipe = small(model_folder, conversations, "zero3.json", max_steps=1, save_steps=1)
    run = run_on(ranks, recipe, tmp_path)
    write_recipe(run, replace(recipe, max_steps=2))
    universal.convert(newest_checkpoint(run))
    ranks.check(universal_groups.main, str(run.path), world_size=1, log=tmp_path / "resumed")
    said = read_logs(tmp_path / "resumed")[0]
    assert "loaded: decays [0.1, 0.1], 1 counters for 2 states" in said, said
    assert "mended: decays [0.1, 0.0], 2 counters for 2 states" in said, said


@pytest.mark.every
def test_deepspeed_does_not_join_split_matrices(ranks, tmp_path, model_folder, conversations):
    """`check` in checkpoint/universal.py can let them pass when they are joined to what they were."""
    folder = {}
    for config, lora in (("zero1.json", Lora(rank=4)), ("zero3.json", None)):
        run = RunFolder(tmp_path / config)
        recipe = small(model_folder, conversations, config, max_steps=1, save_steps=1, lora=lora)
        write_recipe(run, replace(recipe, layout=Layout(tensor=2)))
        ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
        folder[config] = newest_checkpoint(run)
        complete = folder[config] / COMPLETE
        write_json(complete, read_json(complete) | {"layout": asdict(Layout())})  # so that it is tried
    with pytest.raises(UserError, match="exceeds dimension size"):
        universal.convert(folder["zero3.json"])
    # The description of the split matrices lists the frozen ones too, and DeepSpeed stops: they have no states.
    with pytest.raises(UserError, match=r"Unused patterns=.*base_layer"):
        universal.convert(folder["zero1.json"])


@pytest.mark.every
def test_deepspeed_distributes_no_experts_in_a_pipeline(ranks, tmp_path, conversations):
    """A row of recipe/compatibility.py can let pipelines pass when AutoEP finds the experts of a stage."""
    run = RunFolder(tmp_path / "run")
    recipe = small(tmp_path, conversations, "expert_parallel.json", layout=Layout(pipeline=2, expert=2), max_steps=1)
    model = pages.find("mixtral-8x7b", "expert").model
    write_recipe(run, replace(recipe, model=model, draft=Draft(enabled=True), micro_batch_size=1))
    ranks.check(staged_experts.main, str(run.path), world_size=4, log=tmp_path / "log")
    assert all("AutoEP's layers 0, experts in each of the others [4]" in said for said in read_logs(tmp_path / "log"))


@pytest.mark.every
def test_two_stages_per_rank_need_batches_of_one_length(ranks, tmp_path):
    """configs/README.md, "Schedules and rings", can be shorter, and `pipeline.py` use it, when DualPipeV takes them."""
    ranks.check(other_schedules.two_stages_per_rank, log=tmp_path / "log")
    assert all(
        "DualPipeV: " in said and "does not support dynamic_shape" in said for said in read_logs(tmp_path / "log")
    )


@pytest.mark.every
def test_pytorch_has_no_ring_attention_on_cpus(ranks, tmp_path):
    """Ring attention can be compared with Ulysses here, and offered, when its ring computes on CPU ranks."""
    ranks.check(other_schedules.ring, log=tmp_path / "log")
    said = read_logs(tmp_path / "log")
    answers = ("does not have a sharding strategy", "its own part of the sequence only")
    assert all("ring: " in one and any(answer in one for answer in answers) for one in said), said


@pytest.mark.every
def test_zenflow_checkpoints_lose_pending_updates(ranks, tmp_path, model_folder, conversations):
    """`check` in checkpoint/universal.py can let it be resumed when the norms go on as they were."""
    run = run_on(ranks, small(model_folder, conversations, "zenflow.json", save_steps=3), tmp_path)
    undisturbed = read_jsonl(run.metrics)[-1]["grad_norm"]
    gate.resume(ranks, run, tmp_path)
    assert abs(read_jsonl(run.metrics)[-1]["grad_norm"] / undisturbed - 1) > 0.01


@pytest.mark.every
def test_the_trainers_own_sequence_parallelism_doubles_gradients_below_stage_3(ranks, tmp_path):
    """configs/README.md warns of it, and can stop when the two norms are the same."""
    template = json.loads((ROOT / "configs" / "sequence_parallel.json").read_text())
    norms = {}
    for stage in (1, 3):
        path = tmp_path / str(stage) / "sequence_parallel-pretrained.json"
        path.parent.mkdir()
        path.write_text(json.dumps(template | {"zero_optimization": {"stage": stage}}))
        norms[stage] = train_with(ranks, path.parent, "trainer", path)["grad_norm"][0]
    assert norms[1] / norms[3] == pytest.approx(2, rel=1e-2)


LOAD = """
import sys
from pathlib import Path
from deepspeed_recipes.machine import ops
if sys.argv[1] == "mended":
    from deepspeed_recipes.training import upstream
    upstream.compile_ops_once(Path(sys.argv[2]))
ops.load(ops.SHARED_MEMORY)
print("loaded", flush=True)
"""


@pytest.mark.every
def test_torch_waits_for_the_lock_of_a_killed_build(tmp_path):
    """And under another path ninja compiles everything again, which the workaround does not."""
    folder = tmp_path / "ops" / "deepspeed_shm_comm"
    shutil.copytree(ops.extensions_dir() / "deepspeed_shm_comm", folder)
    (folder / "lock").touch()
    built, environment = folder / "deepspeed_shm_comm.so", {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    written = built.stat().st_mtime_ns
    subprocess.run(
        [sys.executable, "-c", "from deepspeed_recipes.machine import ops; ops.stamp('deepspeed_shm_comm')"],
        env=environment,
    )
    command = [sys.executable, "-c", LOAD]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, "plain"], env=environment, timeout=30, capture_output=True)
    mended = [*command, "mended", str(tmp_path / "stack")]
    done = subprocess.run(mended, env=environment, timeout=120, capture_output=True, text=True)
    assert "loaded" in done.stdout, done.stderr
    assert built.stat().st_mtime_ns == written


def test_torchrun_keeps_the_addresses_of_an_earlier_attempt(monkeypatch):
    """`meet_apart_from_earlier_attempts` in training/upstream.py can go when a restarted rank finds an empty store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    found = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=10)))
        found.append(store.check(["address of rank 0"]))
        store.set("address of rank 0", "a port")
    assert found == [False, True]


def test_heads_for_further_tokens_have_no_loss_and_most_families_no_head(tmp_path):
    """`heads.with_further_token` can use `MtpModel` once its loss works, and take more families."""
    recipe = pages.find("glm4_5-air", "full")
    draft.write(replace(recipe, draft=Draft(enabled=True)), tmp_path, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    given = {"attention_mask": None, "position_ids": tokens, "mtp_cache": None}
    with pytest.raises(TypeError, match="'NoneType' and 'Tensor'"):
        modeling_layers.MtpModel(model, 1)(tokens, hidden, **given, labels=tokens)
    described = {
        name.partition("-")[0]
        for name in ("glm4_5-air", "deepseek-v3", "deepseek-v2-lite", "qwen3_5-0.8b", "qwen3_5_moe-35b-a3b")
        if hasattr(AutoConfig.for_model(**pages.find(name, "full").model.config).get_text_config(), "num_mtp_layers")
    }
    assert described == {"glm4_5", "deepseek"}
    for other in ("qwen3_5-0.8b", "qwen3_5_moe-35b-a3b", "minimax_m2-229b", "nemotron_h-30b-a3b"):
        with pytest.raises(ValueError, match="without `num_mtp_layers`"):
            AutoConfig.for_model(**pages.find(other, "full").model.config).get_mtp_config()
