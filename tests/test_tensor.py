"""Tensor parallelism family by family: split over two ranks, a model computes what the whole one does."""

import pytest

from recipes.commands.main import run as run_command
from recipes.spec import deepspeed_file
from recipes.spec.errors import UserError
from recipes.spec.limits import TENSOR_PARALLEL_TYPES
from recipes.spec.project import CHECKOUT as ROOT
from recipes.spec.recipe import Layout
from recipes.spec.run_folder import read_json
from recipes.training.arguments import deepspeed_config
from tests.small import small
from tests.workers import split_layers

EXACT = 1e-5
"""fp64 with norms in fp32, relative to the largest value; mistakes are off by 0.1."""
ROUNDED = 1e-3
"""The same in fp32."""
REFUSED = {"glm4", "olmo3", "phi3"}
"""Whose plan splits whole inputs, which AutoTP does not know."""


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


@pytest.fixture(scope="module")
def by_deepspeed(ranks, tmp_path_factory):
    return said(ranks, tmp_path_factory.mktemp("autotp"), split_layers.autotp_all)


def test_autotp_splits_correctly_what_its_plan_allows_and_nothing_else(by_deepspeed):
    """AutoTP, which splits what `tensor.shard_where_autotp_cannot` leaves to it."""
    assert set(by_deepspeed) > set(TENSOR_PARALLEL_TYPES)
    for kind, found in by_deepspeed.items():
        right = "error" not in found and found["split"] >= 8 and found["weights"]
        right = right and found["logits"] < ROUNDED and found["gradient"] < ROUNDED
        assert right == (kind in TENSOR_PARALLEL_TYPES and kind not in REFUSED), (kind, found)
        assert ("rowwise_split_input" in found.get("error", "")) == (kind in REFUSED)


def test_the_launcher_refuses_before_anything_starts(capsys):
    assert run_command("launch", ["mixtral-8x7b", "full", "layout.tensor=2", "--gpus", "2", "--dry-run"]) == 2
    assert "not mixtral" in capsys.readouterr().err


def test_a_file_with_tensor_parallelism_needs_the_layout_too():
    file = deepspeed_file.read(ROOT / "configs" / "tensor_parallel.json")
    with pytest.raises(UserError, match=r"tensor_parallel\.json splits layers over 2 ranks; add layout\.tensor=2"):
        deepspeed_config(small("", "", "tensor_parallel.json"), file)
    asked = deepspeed_config(small("", "", "tensor_parallel.json", layout=Layout(tensor=4)), file)
    assert asked["tensor_parallel"]["autotp_size"] == 4
