"""Print how far every family's draft over two sequence-parallel ranks is from itself on one."""

import json
import traceback
from pathlib import Path

import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from recipes.spec import pages
from recipes.training import draft, sequence_check, world


def main(answers: str) -> None:
    world.start()
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    group = dist.new_group([0, 1])
    found = {}
    for family in pages.families():
        for size, model in pages.page(family).SIZES.items():
            config = AutoConfig.for_model(**model.config)
            try:
                found[f"{family}-{size}"] = sequence_check.difference(
                    sequence_check.draft_of(config, tokenizer, model.attention), group
                )
            except Exception as error:
                traceback.print_exc()
                found[f"{family}-{size}"] = str(error)
    if dist.get_rank() == 0:
        Path(answers).write_text(json.dumps(found))
    world.stop()
