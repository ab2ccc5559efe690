"""What is traced on the meta device is what autograd keeps: weighed on drafts of every family, and as committed."""

from collections import Counter
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.planning import activations
from recipes.planning.setup import Setup
from recipes.planning.weigh import Live
from recipes.spec import pages
from recipes.spec.recipe import Draft, Lora
from recipes.training import adapters
from recipes.training.draft import TINY_MODEL, shrink

FAMILIES = pages.families()
LORA = Lora(rank=16)
ROWS, LENGTH = 3, 192
WAYS = {
    "full": {},
    "packed": {"packing": True},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora": LORA},
    "lora, packed, checkpointed": {"lora": LORA, "packing": True, "gradient_checkpointing": True},
}


def draft_of(family):
    config = AutoConfig.for_model(**next(iter(pages.page(family).SIZES.values())).config)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    return shrink(config, Draft(enabled=True, layers=6, hidden_size=64), tokenizer)


def setup_of(config, **changes):
    attention = "sdpa" if AutoModelForCausalLM.from_config(config)._supports_sdpa else "eager"
    plain = Setup(1, micro_batch_size=ROWS, sequence_length=LENGTH, gradient_checkpointing=False, packing=False)
    return replace(plain, attention=attention, **changes)


def predicted(anatomy, setup):
    """Return the bytes that live between the forward and the backward pass."""
    ends = activations.traced(anatomy.ends, setup).of(ROWS, LENGTH)
    masks = activations.mask_bytes(anatomy.layers, setup) if setup.gradient_checkpointing else 0
    return sum(activations.kept_bytes(layer, setup) for layer in anatomy.layers) + ends + masks


def weighed(config, setup):
    """Return the bytes that live, of real tensors on the CPU, once a draft has computed its loss."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config.use_cache = False
    if setup.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if setup.lora:
        model.enable_input_require_grads()
        model = adapters.add(model, setup.lora)
    tokens = torch.randint(5, config.vocab_size, (ROWS, LENGTH))
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    live, saved = Live(), Counter()
    live.ignore((*model.parameters(), *model.buffers()))

    def keep(tensor):
        live.save(tensor, 0)
        return tensor.detach()

    with live, saved_tensors_hooks(keep, lambda tensor: tensor):
        given = positions % (LENGTH // 2) if setup.packing else positions.clone()
        loss = model(input_ids=tokens.clone(), labels=tokens.clone(), position_ids=given).loss
    for _, size in live.saved.values():
        saved["saved"] += size
    del given
    return live.bytes if setup.gradient_checkpointing else saved["saved"], loss
