"""Tensor parallelism family by family: split over two ranks, a model computes what the whole one does."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from deepspeed_recipes.recipe import deepspeed_file, limits
from deepspeed_recipes.recipe.compatibility import TENSOR_PARALLEL_TYPES
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.recipe.run_folder import read_json
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training.arguments import deepspeed_config
from deepspeed_recipes.training.parallel import tensor
from deepspeed_recipes.training.parallel.tensor import SHARE, WHOLE, shard
from tests.small import small
from tests.workers import split_layers

EXACT = 1e-5
"""fp64 with norms in fp32, relative to the largest value; mistakes are off by 0.1."""


def said(ranks, folder, what):
    ranks.check(what, str(folder / "said.json"), log=folder / "log")
    return read_json(folder / "said.json")


@pytest.fixture(scope="module")
def sharded(ranks, tmp_path_factory):
    return said(ranks, tmp_path_factory.mktemp("sharded"), split_layers.shard_all)


def test_every_model_type_is_split_correctly_or_refused(sharded):
    assert len(sharded) >= 18
    for kind, found in sharded.items():
        if kind in TENSOR_PARALLEL_TYPES:
            assert found.get("split", 0) >= 8 and found["weights"], (kind, found)
            assert found["logits"] < EXACT and found["gradient"] < EXACT, (kind, found)
        else:
            assert found["error"].startswith("ValueError") and "no plan, or unknown styles" in found["error"], kind
    assert set(sharded) > set(TENSOR_PARALLEL_TYPES)


def test_unsummed_gradients_of_head_norms_are_noticed(ranks, tmp_path):
    wrong = said(ranks, tmp_path, split_layers.shard_wrongly)
    assert wrong["llama"]["gradient"] < EXACT, "it has none"
    assert wrong["qwen3"]["gradient"] > 0.1 and "_norm" in wrong["qwen3"]["worst"]


def test_the_launcher_refuses_before_anything_starts(refusal):
    error = refusal("launch", "mixtral-8x7b", "full", "layout.tensor=2", "--gpus", "2", "--dry-run")
    assert "tensor parallelism does not support mixtral: its experts" in error


COLUMNS = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise")
ATTENTION = {**COLUMNS, "self_attn.o_proj": "rowwise"}
GATED = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
NORMS = dict.fromkeys(("self_attn.k_norm", "self_attn.q_norm"), WHOLE)
UNSEEN = {
    "cohere": (ATTENTION | GATED, []),
    "gemma2": (ATTENTION | GATED, []),
    "qwen3": (ATTENTION | GATED | NORMS, []),
    "opt": (
        {**COLUMNS, "self_attn.out_proj": "rowwise", "fc1": "colwise", "fc2": "rowwise"}
        | {"self_attn.embed_dim": SHARE, "self_attn.num_heads": SHARE},
        [],
    ),
    "olmo2": (GATED, sorted(ATTENTION)),
    "phi3": ({}, ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]),
}
"""What is split without a plan, and what is not: in OLMo 2 a norm covers all heads, in Phi-3 projections are fused."""


@pytest.fixture(scope="module")
def without_plan(ranks, tmp_path_factory):
    return said(ranks, tmp_path_factory.mktemp("without"), split_layers.split_without_plan)


@pytest.mark.every
@pytest.mark.parametrize("kind", UNSEEN)
def test_layers_are_split_where_the_graph_allows_and_named_where_not(without_plan, kind):
    assert without_plan[kind] == list(UNSEEN[kind])


@pytest.mark.every
def test_a_wrong_split_is_not_taken(without_plan):
    """Without the sum of what local heads have in common, attention with norms of heads is left whole."""
    assert without_plan["qwen3, wrongly"] == [GATED, sorted(ATTENTION)]


BLOCKS = {
    "tensor": ({"tensor_parallel": {"autotp_size": 2}}, "layers", "tensor_parallel.autotp_size"),
    "expert": ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "experts", "expert_parallel.autoep_size"),
    "sequence": ({"sequence_parallel_size": 2, "data_parallel_size": 1}, "sequences", "sequence_parallel_size"),
}


@pytest.mark.parametrize("field", BLOCKS)
def test_a_file_that_splits_a_model_needs_the_layout_too(field):
    content, what, key = BLOCKS[field]
    file = deepspeed_file.parse(content | {"zero_optimization": {"stage": 1}}, "mine.json")
    said = rf"deepspeed=mine\.json splits {what} over 2 ranks; add layout\.{field}=2\.$"
    with pytest.raises(UserError, match=said):
        deepspeed_config(small("", ""), file)
    for size, expected in (
        (2, []),
        (4, [f"layout.{field}=4: the run uses this size instead of {key}=2 in mine.json."]),
    ):
        recipe = small("", "", layout=Layout(**{field: size}))
        assert limits.check_blocks(recipe, file) == expected


@pytest.mark.parametrize(("name", "field"), [("pipeline", "pipeline"), ("sequence_parallel", "sequence")])
def test_a_file_of_configs_that_splits_nothing_without_its_layout_is_named(name, field):
    file = deepspeed_file.read(CONFIGS / f"{name}.json")
    said = f"deepspeed={name}.json alone splits nothing, and is ZeRO-{file.stage}; add layout.{field}=2."
    assert limits.check_blocks(small("", ""), file) == [said]
    assert not limits.check_blocks(small("", "", layout=Layout(**{field: 2})), file)


def test_the_layout_decides_on_how_many_ranks_a_file_splits():
    for layout in (Layout(tensor=4), Layout(tensor=2)):
        file = deepspeed_file.parse(BLOCKS["tensor"][0])
        assert deepspeed_config(small("", "", layout=layout), file)["tensor_parallel"]["autotp_size"] == layout.tensor
    config = deepspeed_config(small("", "", layout=Layout(sequence=4)), deepspeed_file.parse(BLOCKS["sequence"][0]))
    assert not {"sequence_parallel_size", "data_parallel_size"} & config.keys()


@pytest.mark.parametrize(
    ("key", "value"), [("partition_config", {}), ("preset_model", "llama"), ("vocab_parallel_lm_head", True)]
)
def test_settings_of_autotp_are_refused(key, value):
    file = deepspeed_file.parse({"tensor_parallel": {"autotp_size": 2, key: value}}, "mine.json")
    with pytest.raises(UserError, match=rf"mine\.json: tensor_parallel\.{key} is for DeepSpeed's AutoTP"):
        limits.check_blocks(small("", "", layout=Layout(tensor=2)), file)


def test_a_number_of_heads_is_divided_by_the_number_of_ranks():
    """By four ranks: 4 heads on two ranks would be 2 each by a subtraction, too."""
    attention = torch.nn.Module()
    attention.heads = 16
    layer = torch.nn.ModuleDict({"attention": attention})
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        shard(layer, {"attention.heads": SHARE}, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert attention.heads == 4


@pytest.mark.parametrize(("alone", "together"), [(True, True), (True, False), (False, False)])
def test_pairs_that_are_right_one_by_one_are_tried_together(monkeypatch, alone, together):
    """What the two ranks would find of each pair is given; the pairs are those of a real model."""
    config = AutoConfig.from_pretrained(TINY_MODEL)
    monkeypatch.setattr(tensor, "_is_right", lambda whole, pairs, group: together if len(pairs) > 1 else alone)
    if alone and not together:
        with pytest.raises(ValueError, match="correct one by one, but not together"):
            tensor.split(config, "sdpa", None)
        return
    styles, rest = tensor.split(config, "sdpa", None)
    assert bool(styles) == alone and any("down_proj" in name for name in (styles if alone else rest))
