"""Imports what ranks import, some of it lazily, and loads the ops that they load: seconds for each of them.

`tests/ranks.py` forks ranks from a process that has imported this.
"""

import contextlib
import gc
import importlib
import io

from transformers import conversion_mapping

from recipes.machine import ops

MODULES = (
    "recipes.training.run",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",  # torch.compile at its head: imports dynamo and inductor
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "trl.trainer.dpo_trainer",
    "trl.trainer.sft_trainer",
    "matplotlib.pyplot",
)

for module in MODULES:
    importlib.import_module(module)
with contextlib.redirect_stdout(io.StringIO()):
    ops.build(ops.OPS["cpu"])
conversion_mapping.get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand regular expressions, once
gc.freeze()  # a collection in a rank would copy every page that it shares with its parent: 1.6 s per run
