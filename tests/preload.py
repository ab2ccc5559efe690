"""Imports what ranks import, some of it lazily, and loads the ops that they load: seconds for each of them.

`tests/ranks.py` forks ranks from a process that has imported this.
"""

import contextlib
import importlib
import io

from recipes.machine import ops

MODULES = (
    "recipes.training.run",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",  # torch.compile at its head: imports dynamo and inductor
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "trl.trainer.dpo_trainer",
    "trl.trainer.sft_trainer",
)

for module in MODULES:
    importlib.import_module(module)
with contextlib.redirect_stdout(io.StringIO()):
    ops.build(ops.OPS["cpu"])
