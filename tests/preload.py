"""Imports what ranks import, some of it lazily, and loads the ops that they load: seconds for each of them.

`tests/ranks.py` forks ranks from a process that has imported this.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import io
import os
import tempfile
from functools import cache
from pathlib import Path

from deepspeed.ops.op_builder.builder import OpBuilder
from transformers import conversion_mapping

from deepspeed_recipes.machine import ops
from deepspeed_recipes.training import upstream

MODULES = (
    "deepspeed_recipes.training.run",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",  # torch.compile at its head: imports dynamo and inductor
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "trl.experimental.cpo",
    "trl.experimental.orpo",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.rloo_trainer",
    "trl.trainer.sft_trainer",
)

for module in MODULES:
    importlib.import_module(module)
# accelerate and transformers read packages' metadata afresh in each of dozens of calls: 4 % of a run on two ranks.
Distribution = importlib.metadata.Distribution
Distribution.from_name = staticmethod(cache(Distribution.from_name))
Distribution.metadata = property(cache(Distribution.metadata.fget))
compile_and_load = OpBuilder.jit_load
# torch alone would compile again wherever the environment has another path, such as a link to it in a second checkout.
upstream.compile_ops_once(Path(tempfile.gettempdir(), f"preload-{os.getpid()}.stack"))
# The second of two workers begins at the other end, so that a new machine compiles on both of its cores.
backwards = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
with contextlib.redirect_stdout(io.StringIO()):
    for op in reversed(ops.OPS["cpu"]) if backwards else ops.OPS["cpu"]:
        if op is not ops.ASYNC_IO or ops.has_libaio():
            ops.load(op)
OpBuilder.jit_load = compile_and_load  # ranks begin as the launcher starts them
conversion_mapping.get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand regular expressions, once
gc.freeze()  # a collection in a rank would copy every page that it shares with its parent: 1.6 s per run
