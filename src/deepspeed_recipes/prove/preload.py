"""Imports the modules that the ranks of a proof need, some of them lazily: this saves seconds per rank.

`ranks.py` forks ranks from a process that has imported this. It must not use a GPU: CUDA does not survive a fork.
"""

import gc
import importlib

from transformers import conversion_mapping

MODULES = (
    f"{__package__.rpartition('.')[0]}.training.run",
    "deepspeed.runtime.zero.muon.original_muon",  # imports dynamo and inductor, for torch.compile
    "deepspeed.runtime.zero.partition_parameters",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.llama.modeling_llama",
)

for module in MODULES:
    importlib.import_module(module)
conversion_mapping.get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand regular expressions, once
gc.freeze()  # a collection in a rank would copy every page that it shares with its parent
