"""Compares every family's draft over two sequence-parallel ranks with the same on one; executed on both."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoTokenizer, PreTrainedConfig

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import first_line
from deepspeed_recipes.training import distributed
from deepspeed_recipes.training.model import draft, probe
from deepspeed_recipes.training.parallel import sequence
from tests.small import language_families


def main(answers: str) -> None:
    """Write for every size of every family how far its draft is off, or what it failed with; and some cases more."""
    distributed.start()
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    group = dist.new_group([0, 1])

    def off(config: PreTrainedConfig, attention: str) -> float | str:
        dtype = probe.check_dtype(attention)
        try:
            return sequence.difference(probe.draft_of(config, tokenizer, attention, dtype, certain=True), group)
        except Exception as error:
            return first_line(error)

    found: dict[str, dict[str, Any]] = {}
    for family in language_families():
        for size, model in pages.page(family).SIZES.items():
            config = AutoConfig.for_model(**model.config)
            found[f"{family}-{size}"] = {"model_type": config.model_type, "off": off(config, model.attention)}
    found["short and long"] = {"off": off(long_and_short(), "sdpa")}
    AttentionInterface.register("by_positions", by_positions)
    AttentionMaskInterface.register("by_positions", lambda *_, **__: None)
    llama = AutoConfig.for_model(**pages.page("llama3").SIZES["1b"].config)
    found["masked by position ids"] = {"off": off(llama, "by_positions")}
    sequence._whole_rotary = lambda module, group: None
    found["short on one rank, long on the other"] = {"off": off(long_and_short(), "sdpa")}
    if distributed.is_first():
        Path(answers).write_text(json.dumps(found))
    distributed.stop()


def long_and_short() -> PreTrainedConfig:
    """Return Phi-4-mini's configuration with LongRoPE's other factors from a position in the second part on."""
    second = sum(probe.LENGTHS) // 2 + 8
    values = dict(pages.page("phi4").SIZES["mini"].config)
    rope = {**values["rope_parameters"], "original_max_position_embeddings": second}
    return AutoConfig.for_model(**(values | {"rope_parameters": rope, "original_max_position_embeddings": second}))


def by_positions(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    position_ids: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention that tells documents apart by the position ids it is given, as flash attention does."""
    assert module.config._attn_implementation == "by_positions"  # flash attention chooses its kernel by it
    documents = (position_ids == 0).cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~same.tril()[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None
