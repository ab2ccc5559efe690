"""Every workaround for a library: the defect, its place, and the test that fails or passes once it can be removed.

Nothing else in the project assigns to a trainer, an engine, an accelerator or a library's module. Two more workarounds
have their own modules: `peft_without_bitsandbytes.py`, which has to be imported first, and the split layers of
`parallel/tensor.py`, which take AutoTP's place.
"""

import contextlib
import faulthandler
import importlib
import inspect
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from functools import partial, wraps
from pathlib import Path
from typing import Any

import datasets.arrow_writer
import safetensors.torch
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject import layers as autotp
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, register_external_parameter
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.trainable_tokens import layer as trainable_tokens
from peft.utils.other import TrainableTokensWrapper
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils import cpp_extension
from transformers import PreTrainedModel, TrainerState, TrainingArguments, masking_utils, modeling_utils
from transformers.integrations.deepspeed import deepspeed_config
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import chat_template_utils
from trl.trainer import utils as trl_utils

from ..machine import ops
from ..recipe.files import Json

try:
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter
except ImportError:  # DeepSpeed before 0.19.2 has no AutoEP, so no layer is of these types
    AutoEP = parse_autoep_config = None
    AutoEPMoELayer = TokenChoiceTopKRouter = type("NoSuchLayer", (), {})


def write_safetensors_for_the_umask() -> None:
    """Give files of tensors the mode of any new file: safetensors 0.8 lets nobody but their owner read them.

    It writes a temporary file and renames it (safetensors#782), so that a colleague, or a server of another user, could
    read an export's configuration and not its weights. This module calls it, since whatever writes tensors imports it.
    """
    write = safetensors.torch.serialize_file

    @wraps(write)
    def written(tensors: Json, filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        write(tensors, filename, metadata=metadata)
        umask = os.umask(0o077)
        os.umask(umask)
        os.chmod(filename, 0o666 & ~umask)

    safetensors.torch.serialize_file = written


write_safetensors_for_the_umask()


def leave_out_shared_memory() -> None:
    """Make ranks on CPUs sum through gloo instead of DeepSpeed's op.

    DeepSpeed compiles that op for every process on a CPU, for 20 s or, next to an installation, more than a minute, and
    uses it for tensor parallelism alone. The op sums over all ranks, whatever their group, and maps 66 MB per rank from
    /dev/shm, which a killed rank leaves there, in memory, for good. `shared_memory_group` in
    `prove/defects/in_deepspeed.py` shows the wrong sum; `test_prove.py` fails once it is right.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # the attribute of that name is torch itself
    backend.build_shm_op = lambda: None


def keep_json_numbers() -> None:
    """Make the JSON columns of `datasets` keep numbers as they are.

    It writes and reads them with pandas' JSON, which rounds to ten decimals (1e-12 becomes 0), turns NaN into null, and
    cannot read integers over 64 bits, whose objects then arrive as texts.
    """
    for module in (datasets.features.features, datasets.utils.json, datasets.arrow_writer):
        module.ujson_dumps, module.ujson_loads = json.dumps, json.loads


def date_chats(began: str) -> None:
    """Make chat templates that write today's date, as Llama 3's do, write the date on which the run began.

    A run that resumes on another day, without the tokens in the cache, would otherwise be refused for other data.
    """

    class Began(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Began":
            return cls.fromisoformat(began).astimezone(tz)

    chat_template_utils.datetime = Began


def compile_ops_once(stack: Path) -> None:
    """Load compiled ops without calling ninja; compile the others in one rank, with a time limit, while the rest wait.

    torch 2.13 starts ninja at every load, which compiles again if the environment has another path, and it waits for a
    lock that outlives a killed build. `test_torch_waits_for_the_lock_of_a_killed_build` fails once this can be removed.
    A rank whose build does not finish writes its stack to `stack` before it exits.
    """
    compile_and_load = OpBuilder.jit_load

    def load(builder: OpBuilder, verbose: bool = True) -> Any:
        stack.parent.mkdir(parents=True, exist_ok=True)
        with stack.open("w") as file:
            faulthandler.dump_traceback_later(ops.LONGEST, exit=True, file=file)
            try:
                loaded = compiled(builder.name)
                if loaded is None:
                    with ops.lock(builder.name):
                        loaded = compiled(builder.name) or compile_here(builder, verbose)
            finally:
                faulthandler.cancel_dump_traceback_later()
        OpBuilder._loaded_ops[builder.name] = loaded
        return loaded

    def compiled(name: str) -> Any:
        # The result of compiling for a GPU depends on the GPU; ninja detects that.
        if get_accelerator().device_name() != "cpu" or not ops.is_compiled(name):
            return None
        return cpp_extension._import_module_from_library(name, str(ops.extensions_dir() / name), True)

    def compile_here(builder: OpBuilder, verbose: bool) -> Any:
        if not ops.is_compiled(builder.name):
            print(f"DeepSpeed op {builder.name}: compiling, which can take minutes, once", flush=True)
        loaded = compile_and_load(builder, verbose)
        ops.stamp(builder.name)
        return loaded

    OpBuilder.jit_load = load


@contextlib.contextmanager
def without_tensor_parallel_block() -> Iterator[None]:
    """Load a model as if it were not to be split: DeepSpeed splits it later, when it creates the engine.

    transformers refuses to load a checkpoint under ZeRO-3 where the configuration has tensor parallelism.
    `test_tensor_parallel_refuses_adapters_and_zero3_checkpoints` fails once this can be removed.
    """
    config = deepspeed_config() or {}
    block = config.pop("tensor_parallel", None)
    try:
        yield
    finally:
        if block is not None:
            config["tensor_parallel"] = block


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give a library's module or class another attribute within a `with` block."""
    original = vars(owner)[name]  # of a class the static method, not its function
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def reading_any_index() -> contextlib.AbstractContextManager[None]:
    """Load a sharded model whose index has no `metadata`, or null: only the map from weights to files is needed.

    transformers ends in a KeyError or a TypeError there; `test_transformers_needs_an_indexs_metadata` fails once this
    can be removed.
    """
    shard_files = modeling_utils.get_checkpoint_shard_files

    def read(folder: object, index: str, *arguments: object, **options: object) -> Any:
        content = json.loads(Path(index).read_text(encoding="utf-8"))
        if isinstance(content.get("metadata"), dict):
            return shard_files(folder, index, *arguments, **options)
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(content | {"metadata": {}}, file)
            file.flush()
            return shard_files(folder, file.name, *arguments, **options)

    return _replaced(modeling_utils, "get_checkpoint_shard_files", read)


def reading_state(state: Mapping[str, torch.Tensor] | None) -> contextlib.AbstractContextManager[None]:
    """Let `from_pretrained` load these tensors instead of its folder's, unless None, and everything else from there.

    With its argument `state_dict` it would take neither the folder's generation settings nor its name.
    """
    if state is None:
        return contextlib.nullcontext()
    own = PreTrainedModel._load_pretrained_model
    load = staticmethod(lambda model, _, *rest: own(model, state, *rest))
    return _replaced(PreTrainedModel, "_load_pretrained_model", load)


def keep_used_conversions(model: PreTrainedModel) -> None:
    """Let `save_pretrained` restore the names that the model's files have.

    ZeRO-3's loading records every conversion that transformers knows for the model, used or not, and saving reverts
    them all: it adds prefixes, or takes experts apart, that the files never had. Elsewhere it records the used ones.
    """
    if conversions := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [one for one in conversions if one.was_used()]


def restore_rotary_frequencies(model: PreTrainedModel) -> None:
    """Compute the rotary frequencies again in fp32, where `zero.Init` made them in the training dtype.

    Under ZeRO-3 DeepSpeed 0.19.8 casts every floating-point tensor that is created while the model is built, buffers
    included. In bf16 a frequency is off by up to 0.4 %: 4 radians at position 1,000, so the model trains at other
    positions than later loads of its weights compute. `test_zero_init_rounds_the_rotary_frequencies` fails once this
    can be removed.
    """
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(name.endswith("inv_freq") and buffer.dtype != torch.float32 for name, buffer in buffers.items()):
            exact = type(module)(config=module.config)
            for name, buffer in buffers.items():
                setattr(module, name, getattr(exact, name).to(buffer.device))


def keep_4bit_layout(model: torch.nn.Module) -> None:
    """Keep 4-bit weights as they were packed.

    On CPUs with AVX-512 bitsandbytes repacks them in place in the first forward pass of an evaluation, into bytes that
    DeepSpeed and a checkpoint would take for the old ones, and it requires widths that are multiples of 32.
    `test_bitsandbytes_repacks_on_the_cpu` fails once this can be removed. Layers are found by attribute, not by class,
    since most runs need not import bitsandbytes (`peft_without_bitsandbytes.py`).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def tell_whether_packed(model: torch.nn.Module, packed: bool) -> None:
    """Set, for transformers' masks in training `model` in this process, whether sequences are packed.

    transformers would read the position ids at every pass to find out, and wait for the device. `test_levers.py` passes
    without this once it can be removed.
    """

    def known(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not model.training:
            return find_packed_sequence_indices(position_ids)
        return (torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1) if packed else None

    masking_utils.find_packed_sequence_indices = known


def narrow_loss_tiles(columns: int) -> None:
    """Make TRL's fused head compute logits for `columns` vocabulary entries at a time.

    Its own 32,768 take 8 bytes per token and entry of a 128k vocabulary at 4,096 tokens where there is no Triton.
    `test_levers.py` passes without this once it can be removed.
    """
    trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = columns


def score_every_token() -> None:
    """Make TRL's fused head compute logits for every token that it is given, without searching for labels among them.

    With Triton it selects by a mask, and the host waits for the device twice in the forward pass and once in the
    backward pass of every micro-batch; `transforms.tile_loss` passes only the labelled tokens, which the collator has
    found.
    `test_trls_tiled_loss_reads_which_tokens_are_labelled` fails once this can be removed.
    """
    trl_utils._use_triton = lambda device: False


def remember_gradient_norm(engine: DeepSpeedEngine) -> None:
    """Make the engine report its gradient norm in fp32 without ZeRO too, where DeepSpeed computes and forgets it.

    DeepSpeed 0.19.8, engine.py, `clip_fp32_gradients`: the return value of `clip_grad_norm_` is dropped, and without
    clipping it is not called, so that nothing would notice a gradient that is not finite.
    `test_deepspeed_forgets_the_fp32_gradient_norm` fails once this can be removed.
    """

    def clip_and_remember(*_: object) -> None:
        most = engine.gradient_clipping() or math.inf
        engine._global_grad_norm = clip_grad_norm_(engine.module.parameters(), most, mpu=engine.mpu)

    engine.clip_fp32_gradients = clip_and_remember
    if not (
        engine.gradient_clipping() or engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()
    ):
        engine.basic_optimizer.register_step_pre_hook(clip_and_remember)


def leave_out_step_of_zeros() -> None:
    """Make the first counted step of an optimizer in bf16 or fp16 without ZeRO the first real one.

    To allocate the states DeepSpeed 0.19.8 makes a step with gradients of zero when it creates the engine. Adam's first
    updates are then 0.74, 0.86, 0.91, ... of their correct size, and weights are decayed once more. Optimizers allocate
    their states themselves at their first step. `step_of_zeros` in `prove/defects/in_deepspeed.py` shows it;
    `test_prove.py` fails once it is right.
    """
    for kind in (FP16_Optimizer, FP16_UnfusedOptimizer):
        kind.initialize_optimizer_states = lambda self: None


def link_weights_in_their_order() -> None:
    """Make ZeRO 1 and 2 find each weight's fp32 copy with `round_robin_gradients`, which reorders the weights.

    DeepSpeed 0.19.8, stage_1_and_2.py, `_link_all_hp_params`: it counts offsets in the model's order unless the weights
    are padded. Norms by layer, `safe_get_full_fp32_param` and universal checkpoints then mix weights up: a run that
    resumed on another number of ranks went on from a loss of 9.8 instead of 2.9. `round_robin_order` in
    `prove/defects/in_deepspeed.py` shows it; `test_prove.py` fails once it is right.
    """
    link = DeepSpeedZeroOptimizer._link_all_hp_params

    @wraps(link)
    def linked(self: DeepSpeedZeroOptimizer) -> None:
        padding = self.round_robin_bit16_padding
        if self.round_robin_gradients:  # only with padding the actual offsets are used; nothing else here reads it
            self.round_robin_bit16_padding = [[1] for _ in padding]
        try:
            link(self)
        finally:
            self.round_robin_bit16_padding = padding

    DeepSpeedZeroOptimizer._link_all_hp_params = linked


def meet_apart_from_earlier_attempts(timeout: timedelta) -> None:
    """Connect ranks that torchrun has restarted under a name of this attempt.

    torch 2.13.0 keeps one store for all attempts (elastic/rendezvous/dynamic_rendezvous.py), without a prefix since
    "we create a new TCPStore for every retry" (distributed/rendezvous.py). A rank that reads an address before its
    owner has replaced it connects to a dead process, `Gloo connectFullMesh failed`: in one of two trials with three
    groups. `test_torchrun_keeps_the_addresses_of_an_earlier_attempt` fails once this can be removed.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    backend = get_accelerator().communication_backend_name()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None
    apart = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=apart, rank=rank, world_size=world_size, timeout=timeout, device_id=device)


def forget_kept_weights(engine: DeepSpeedEngine) -> None:
    """Let ZeRO-3 decide again which weights it keeps until the backward pass, after the order of modules has changed.

    DeepSpeed 0.19.8, partitioned_param_coordinator.py, caches this decision permanently, by module and position. After
    an evaluation, which has no backward pass, the decision is to keep none, and every later step gathers all weights
    twice: 24.4 MB instead of 12.2 per step of `tiny full` on two CPU ranks.
    `test_zero3_decides_once_which_weights_it_keeps` fails once this can be removed.
    """
    if not hasattr(engine.optimizer, "parameter_offload"):
        return
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    invalidate = coordinator._invalidate_trace

    def invalidate_and_forget() -> None:
        invalidate()
        kept_weights().cache_clear()

    coordinator._invalidate_trace = invalidate_and_forget


def kept_weights() -> Any:
    """Return DeepSpeed's cached decision; an outer wrapper shows it in traces."""
    wrapped = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    return inspect.getclosurevars(wrapped).nonlocals["func"]


def before_refused_updates(engine: DeepSpeedEngine, look: Callable[[], None]) -> None:
    """Call `look` when the engine is about to refuse an update whose gradients are not finite.

    DeepSpeed 0.19.8 discards the gradients before anyone else can inspect them; it calls `_update_scale(overflow)` just
    before, at every ZeRO stage. Without ZeRO there is nothing to inspect. `test_guard.py` passes without this once it
    can be removed.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "_update_scale"):
        return
    update = optimizer._update_scale

    def look_first(has_overflow: bool = False) -> Any:
        if has_overflow:
            look()
        return update(has_overflow)

    optimizer._update_scale = look_first


def mark_as_split(model: torch.nn.Module) -> None:
    """Leave on a split model what AutoTP would: how a universal checkpoint joins the parts, and a mark that it has run.

    `parallel/tensor.py` splits in its place; it gives the reasons.
    """
    setattr(model, UNIVERSAL_CHECKPOINT_INFO, autotp.collect_autotp_universal_checkpoint_info(model))
    model.ds_autotp_parsed = True


def route_as_transformers(model: PreTrainedModel, in_fp32: bool = False) -> None:
    """Make AutoEP's routers compute what transformers' do: for DeepSeek's models, and for others that route `in_fp32`.

    DeepSpeed 0.19.8 multiplies in the weights' dtype, where transformers does so in fp32: in bf16 a token near a
    decision boundary goes to another expert. It also restricts tokens to the best groups of experts wherever a
    configuration has groups, though V2's `topk_method` can be `greedy`. `test_autoep_routes_deepseek_differently` fails
    once this can be removed.
    """
    if not in_fp32 and model.config.model_type not in ("deepseek_v2", "deepseek_v3"):
        return
    for layer in model.modules():
        if isinstance(layer, AutoEPMoELayer):
            gate = layer.router.gate
            gate.forward = lambda hidden, gate=gate: torch.nn.functional.linear(hidden.float(), gate.weight.float())
            if getattr(model.config, "topk_method", None) == "greedy":
                layer.router.num_expert_groups = None


def take_intervals(state: TrainerState, arguments: TrainingArguments) -> None:
    """Let a resumed run log, evaluate and save at the intervals in its arguments.

    transformers 5.22 keeps the intervals of the checkpoint, and only warns. `test_resume.py` changes them between two
    starts; it passes without this once it can be removed.
    """
    state.compute_steps(arguments, state.max_steps)


def take_update_settings(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, asked: Sequence[Json]) -> None:
    """Let a resumed run update weights with the learning rate, the decay and Adam's settings of its recipe.

    DeepSpeed and transformers load those of the checkpoint. From a universal checkpoint DeepSpeed 0.19.8 under ZeRO-3
    (stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`) gives every group of parameters the settings of
    the first, so norms and biases would be decayed. `test_resume_settings.py` passes without this once it can be
    removed. `asked` are the settings of each group before the checkpoint was loaded. A `scheduler` block of a DeepSpeed
    file has its own rates and is left alone.
    """
    groups = optimizer.param_groups
    for group, own in zip(groups, asked, strict=True):
        group.update(own)
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it if the file has an optimizer
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        for group, base, share in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * share(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in groups]


def separate_step_counters(engine: DeepSpeedEngine) -> None:
    """Under ZeRO-3, let each state of the optimizer count its own steps after a universal checkpoint was loaded.

    DeepSpeed 0.19.8 gives all of them one tensor, which each advances (the same function of stage3.py).
    `test_zero3_forgets_the_groups_of_a_universal_checkpoint` fails once this can be removed.
    """
    if engine.load_universal_checkpoint() and engine.zero_optimization_partition_weights():
        for state in engine.optimizer.optimizer.state.values():
            if torch.is_tensor(state["step"]):
                state["step"] = state["step"].clone()


def reshard_small_parameters(engine: DeepSpeedEngine) -> None:
    """Under ZeRO-3, shard small weights again after a checkpoint was loaded, as in a fresh engine.

    DeepSpeed 0.19.8 gathers them at the end of a load and releases each after its module's first forward pass; DoRA,
    which reads an adapter's weight from outside its module, then finds it empty. A fresh engine gathers at the first
    forward pass, and keeps them. `test_catalogue.py` resumes DoRA under ZeRO-3 without this once it can be removed.
    """
    small = getattr(engine.optimizer, "persistent_parameters", [])
    if small:
        small[0].partition(small)


class _RowsInOutputs(TrainableTokensLayer):
    """Trains rows of an embedding or a head by replacing their outputs, with the base layer's own forward pass."""

    def forward_adapters(
        self, x: torch.Tensor, active_adapters: Sequence[str], *args: object, **options: object
    ) -> Any:
        """Return the output of the base layer with that of the trained rows in its place."""
        known = [name for name in active_adapters if name in self.trainable_tokens_delta]
        if self.disable_adapters or self.merged or not known:
            return super().forward_adapters(x, active_adapters, *args, **options)
        result = self.base_layer(x, *args, **options)
        for name in known:
            rows = self.trainable_tokens_delta[name]
            numbers = torch.tensor(self.token_indices[name], device=x.device)
            if isinstance(self.base_layer, torch.nn.Embedding):
                found = x[..., None] == numbers
                own = torch.nn.functional.embedding(found.int().argmax(-1), rows)
                scale = self._get_embed_scale()
                own = own if scale is None else own * scale.to(own.dtype)
                result = torch.where(found.any(-1)[..., None], own.to(result.dtype), result)
            else:
                own = torch.nn.functional.linear(x, rows.to(x.dtype))
                result = result.index_copy(-1, numbers, own.to(result.dtype))
        return result

    def get_merged_weights(self, active_adapters: Sequence[str]) -> torch.Tensor:
        """Return the whole weight with the trained rows, which a loss in tiles reads; without them for a reference."""
        if self.disable_adapters:  # PEFT returns the trained rows
            return self.base_layer.weight
        parts = [self.base_layer.weight, *self.trainable_tokens_delta.values()]
        sharded = [one for one in parts if getattr(one, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]
        with GatheredParameters(sharded):
            merged = super().get_merged_weights(active_adapters)
        merged.ds_status = ZeroParamStatus.AVAILABLE  # for TRL, which gathers what is not
        return merged


def replace_rows_in_outputs(model: torch.nn.Module) -> None:
    """Let layers whose rows PEFT trains compute with their own weight, and replace the rows' outputs.

    PEFT 0.21.2 copies the whole weight at every pass and holds a gradient for all of it, and reads it where ZeRO-3 has
    released it (`test_peft_copies_an_embedding_to_train_a_row` fails once it does not).
    """
    for layer in model.modules():
        if isinstance(layer, TrainableTokensLayer):
            layer.__class__ = _RowsInOutputs
            for rows in layer.trainable_tokens_delta.values():
                register_external_parameter(layer, rows)  # it is in a ParameterDict, which no hook gathers
        elif isinstance(layer, TrainableTokensWrapper):
            layer.register_parameter("bias", None)  # TRL's losses in tiles read the head's


@contextlib.contextmanager
def reading_rows(model: PreTrainedModel) -> Iterator[None]:
    """Let PEFT read the rows that it trains under ZeRO-3.

    PEFT 0.21.2 does it on a GPU only (`_collect_token_weights`); `test_peft_copies_an_embedding_to_train_a_row` fails
    once it needs none.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # none, or an nn.Identity, in a stage
    weights = [weight for one in ends if (weight := getattr(one, "weight", None)) is not None]
    without_zero3 = _replaced(trainable_tokens, "check_deepspeed_zero3_enabled", lambda: False)
    with without_zero3, GatheredParameters(weights):
        yield


def load_universal(engine: DeepSpeedEngine, universal: bool) -> None:
    """Let the engine load the next checkpoint in its universal form, or as its ranks wrote it.

    DeepSpeed reads this once, from its configuration; a run's best checkpoint may differ from the one that it resumed
    from.
    """
    engine._config.load_universal_checkpoint = universal


def train_pipeline(engine: DeepSpeedEngine, micro_batches: Sequence[object]) -> torch.Tensor:
    """Return the loss of one optimizer step over `micro_batches`, of which an epoch's last step may have fewer.

    DeepSpeed 0.19.8 expects the number in its configuration, and waits for the rest. `test_pipeline.py` ends an epoch
    with fewer; it passes without this once it can be removed.
    """
    engine.micro_batches = len(micro_batches)
    return engine.train_batch(iter(micro_batches)).detach()


def sum_tied_gradients(engine: DeepSpeedEngine) -> None:
    """Add up the gradients of the weight that a pipeline's stages share where ZeRO accumulates them apart, in fp16.

    DeepSpeed 0.19.8, pipe/engine.py, `_exec_reduce_tied_grads`, reads `weight.grad`, which is None where ZeRO-1 keeps
    fp32 sums in `weight.grad_accum` (`data_types.grad_accum_dtype`): each stage then trains a copy of its own.
    `parity/test_configs.py` passes without this once it can be removed.
    """
    if not hasattr(engine, "_INSTRUCTION_MAP"):
        return

    def reduce(engine: DeepSpeedEngine) -> None:
        for weight, group in engine.module.get_tied_weights_and_groups():
            if (summed := getattr(weight, "grad_accum", None)) is not None:
                dist.all_reduce(summed, group=group)
        usual(engine)

    (usual,) = (run for kind, run in engine._INSTRUCTION_MAP.items() if kind.__name__ == "ReduceTiedGrads")
    engine._INSTRUCTION_MAP = {kind: reduce if run is usual else run for kind, run in engine._INSTRUCTION_MAP.items()}


def mark_phases(engine: DeepSpeedEngine, phase: Callable[[str], contextlib.AbstractContextManager]) -> None:
    """Surround the engine's backward passes and updates with ranges of their names.

    accelerate makes both in one call, and DeepSpeed 0.19.8 marks them on GPUs only. A pipeline's engine runs the whole
    step; it finds its instructions in a table. `test_profile.py` passes without this once it can be removed.
    """
    if hasattr(engine, "_INSTRUCTION_MAP"):
        names = {"ForwardPass": "forward", "BackwardPass": "backward", "OptimizerStep": "step"}
        engine._INSTRUCTION_MAP = {
            kind: _within(partial(phase, names[kind.__name__]), run) if kind.__name__ in names else run
            for kind, run in engine._INSTRUCTION_MAP.items()
        }
        return
    engine.backward = _within(partial(phase, "backward"), engine.backward)
    engine.step = _within(partial(phase, "step"), engine.step)


def _within(around: Callable[[], contextlib.AbstractContextManager], call: Callable[..., object]) -> Callable[..., Any]:
    @wraps(call)
    def inside(*arguments: object, **options: object) -> Any:
        with around():
            return call(*arguments, **options)

    return inside
