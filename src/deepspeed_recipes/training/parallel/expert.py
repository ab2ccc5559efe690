"""Expert parallelism (DeepSpeed's AutoEP): each rank holds some of the experts of an MoE layer.

AutoEP's settings for an architecture without a preset are found on a shrunken model. A layer of experts is found by its
weights: one child holds the matrices of all experts, [experts, out, in], another the router's, [experts, hidden]. The
router's score function is found by trying those that AutoEP offers, in one process: the first that gives the logits and
gradients of transformers' own code is used.
"""

import copy
import itertools
import logging
import re
from dataclasses import dataclass, field
from functools import cache

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import groups, logger
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...recipe.compatibility import EXPERT_COUNTS, EXPERT_PARALLEL_TYPES, refusal
from ...recipe.errors import first_line, first_sentence
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from .. import distributed, upstream
from ..model import draft, load, probe
from ..upstream import AutoEPMoELayer


def layers(model: torch.nn.Module) -> dict[str, AutoEPMoELayer]:
    """Return AutoEP's layers by name; empty without expert parallelism."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}


def whole_state(model: PreTrainedModel, keys: JsonView) -> dict[str, torch.Tensor]:
    """Return the state of the ordinary Hugging Face model on rank 0, and nothing on the others; a collective.

    Weights are gathered one by one and moved to the CPU: no rank's device ever holds more than one layer's experts.
    AutoEP's `w1` and `w3`, [local experts, feed-forward, hidden], are the gate and up projections, which transformers
    holds as one matrix, [experts, 2 x feed-forward, hidden]; `w2` is the down projection. `keys` is the engine's
    `expert_parallel` block, which has transformers' names for the parts of a layer.
    """
    spread = layers(model)
    shared = {
        "shared_experts": keys.get("shared_experts_pattern", "shared_experts"),
        "shared_experts_gate": keys.get("shared_experts_gate_pattern", "shared_experts_gate"),
    }
    router = keys.get("router_pattern", "gate")
    experts = keys.get("expert_pattern", "experts")
    outwards, back = keys.get("expert_w1", "gate_up_proj"), keys.get("expert_w2", "down_proj")
    with torch.device("meta"):  # the same model without AutoEP's layers
        ordinary = set(type(model)(model.config).state_dict())
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        layer = next((layer for layer in spread if name.startswith(f"{layer}.")), None)
        part, _, rest = name.removeprefix(f"{layer}.").partition(".")
        if layer is None:
            _keep(state, name, _unsharded(value))
        elif part in shared:
            _keep(state, f"{layer}.{shared[part]}.{rest}", _unsharded(value))
    for name, layer in spread.items():
        weights = (layer.experts.w1, layer.experts.w2, layer.experts.w3)
        group = groups._get_expert_parallel_group(layer.ep_group_name)
        # Rank r of the group holds the r-th equal share of the experts.
        gate, down, up = (torch.cat(distributed.gathered(_unsharded(weight), group)) for weight in weights)
        _keep(state, f"{name}.{experts}.{outwards}", torch.cat([gate, up], dim=1))
        _keep(state, f"{name}.{experts}.{back}", down)
        for key, value in layer.router.state_dict(keep_vars=True).items():
            own = key.removeprefix("gate.")
            # AutoEP's router takes over the correction biases, which in MiniMax M2 belong to the block.
            place = f"{name}.{own}" if f"{name}.{own}" in ordinary else f"{name}.{router}.{own}"
            _keep(state, place, _unsharded(value))
    return state


def _keep(state: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    if distributed.is_first():
        state[name] = value.cpu()


def _unsharded(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight gathered from ZeRO-3's shards."""
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    with GatheredParameters([weight]):
        return weight.detach().clone()


@dataclass(frozen=True)
class Mixture:
    """AutoEP's settings for a model."""

    keys: JsonView = field(default_factory=dict)
    """For the DeepSpeed file's `expert_parallel` block; empty where DeepSpeed's own preset is proven."""
    routes_in_fp32: bool = False
    """True if transformers' router computes in fp32 whatever the weights' dtype."""


def mixture(recipe: Recipe) -> Mixture:
    """Return AutoEP's settings; takes a second the first time, and must run before ZeRO-3 shards new models.

    They must give transformers' results, and the router logits that the recipe's loss needs.
    """
    found = _mixture(recipe.model.path, recipe.model.trust_remote_code)
    if found.keys and recipe.router_aux_loss_coef:
        raise refusal("no router logits", weight=recipe.router_aux_loss_coef, kinds=", ".join(EXPERT_PARALLEL_TYPES))
    return found


@cache
def _mixture(path: str, trust_remote_code: bool) -> Mixture:
    config = load.config_of(path, trust_remote_code)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # transformers loads Qwen3.5's vision-language checkpoints as language models; Gemma 3's keep their tower.
    if kind is not None and kind.config_class is type(config.get_text_config()):
        config = config.get_text_config()
    for name in ("router_jitter_noise", "input_jitter_noise"):  # it multiplies the routers' input in training
        if value := getattr(config, name, 0):
            raise refusal("noisy routers", name=name, value=value, path=path)
    return Mixture() if config.model_type in EXPERT_PARALLEL_TYPES else find(config)


def find(config: PreTrainedConfig) -> Mixture:
    """Return AutoEP's settings for a model of this configuration.

    If no setting computes what transformers does, the message has the smallest difference or the error.
    """
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    try:
        whole = probe.draft_of(config, tokenizer)
    except Exception as error:  # a model's own code may raise anything
        raise refusal("experts not checked", kind=config.model_type, error=first_line(error)) from error
    found = blocks(whole)
    if not found or config is not config.get_text_config():
        raise refusal("no experts found", kind=config.model_type)
    name, parts = next(iter(found.items()))
    block = whole.get_submodule(name)
    # Correction biases, zero in a fresh model, get values that change the result. They are the router's or, in MiniMax
    # M2, the block's.
    router, generator = block.get_submodule(parts["router_pattern"]), torch.Generator().manual_seed(0)
    own = itertools.chain(block.named_buffers(recurse=False), block.named_parameters(recurse=False))
    for key, value in itertools.chain(router.named_parameters(), router.named_buffers(), own):
        if key != "weight" and value.is_floating_point():
            value.detach().copy_(0.1 * torch.randn(value.shape, generator=generator))
    reason = ""
    for score, norm in itertools.product(("softmax", "sigmoid"), (True, False)):
        keys = {
            "moe_layer_pattern": re.sub(r"\d+", r"\\d+", re.escape(name)),
            "num_experts_attr": next(one for one in EXPERT_COUNTS if hasattr(config, one)),
            **parts,
            "score_func": score,
            "route_norm": norm,
        }
        try:
            off = difference(whole, keys, len(found))
        except Exception as error:  # AutoEP refuses architectures that it does not support, or fails on them
            reason = first_sentence(first_line(error))
            continue
        if off < probe.LEAK[torch.float32]:
            break
        reason = f"a shrunken model differs by {off:.0e}"
    else:
        raise refusal("experts differ", kind=config.model_type, error=reason)
    # Does the router return fp32 logits in bf16? Its block passes it the right arguments.
    copied = copy.deepcopy(block).bfloat16()
    router = copied.get_submodule(parts["router_pattern"])
    seen: list[torch.dtype] = []
    router.register_forward_hook(lambda module, given, output: seen.append(output[0].dtype))
    with torch.no_grad():
        copied(torch.ones(1, 1, whole.config.hidden_size, dtype=torch.bfloat16))
    return Mixture(keys, routes_in_fp32=seen == [torch.float32])


def blocks(model: nn.Module) -> dict[str, Json]:
    """Return AutoEP's keys for every layer of experts, with the names of its parts, by the layer's name."""
    found = {}
    for name, block in model.named_modules():
        children = dict(block.named_children())
        experts = [child for child, module in children.items() if len(_stacked(module)) == 2]
        if len(experts) != 1:
            continue
        outwards, back = _stacked(children[experts[0]])
        count = len(getattr(children[experts[0]], outwards))
        own = {child: getattr(module, "weight", None) for child, module in children.items()}
        matrices = {child: one for child, one in own.items() if isinstance(one, nn.Parameter) and one.ndim == 2}
        routers = [child for child, matrix in matrices.items() if len(matrix) == count]
        if len(routers) != 1:
            continue
        parts = {"router_pattern": routers[0], "expert_pattern": experts[0], "expert_w1": outwards, "expert_w2": back}
        shared = [child for child in children if child not in (*matrices, *experts)]
        gates = [child for child, matrix in matrices.items() if len(matrix) == 1 and child not in routers]
        if shared:
            parts |= {"has_shared_experts": True, "shared_experts_pattern": shared[0]}
        if gates:
            parts["shared_experts_gate_pattern"] = gates[0]
        found[name] = parts
    return found


def _stacked(module: nn.Module) -> list[str]:
    """Return the names of the parameters that hold the matrices of all experts, [experts, out, in], in their order."""
    return [name for name, value in module.named_parameters(recurse=False) if value.ndim == 3]


def difference(whole: PreTrainedModel, keys: JsonView, count: int) -> float:
    """Return how far a draft with AutoEP's layers is from `whole`: logits and gradients, as a share of the largest.

    `keys` are for the `expert_parallel` block; AutoEP has to find `count` layers of experts.
    """
    replaced = copy.deepcopy(whole)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it announces every layer
    try:
        settings = {**keys, "enabled": True, "autoep_size": 1, "use_grouped_mm": False}
        auto = upstream.AutoEP(replaced, upstream.parse_autoep_config(settings))
        layers = auto.ep_parser()
        auto.replace_moe_layers(layers, 1, 0)
    finally:
        logger.setLevel(level)
    if len(layers) != count:
        raise ValueError(f"AutoEP finds {len(layers)} of {count} layers")
    tokens = probe.random_tokens(whole.config, 2, 48)
    (found, _), (expected, _) = probe.computed(replaced, tokens), probe.computed(whole, tokens)
    # All other layers contribute to the gradient of the embeddings.
    gradients = [model.get_input_embeddings().weight.grad for model in (replaced, whole)]
    return max(probe.off(found, expected), probe.off(*gradients))
