"""What is said of the layers: which gradients vanish or explode, on the screen, in metrics.jsonl and in the report."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe.run_folder import append_jsonl, read_jsonl
from deepspeed_recipes.report import run_data, text, write
from deepspeed_recipes.report.page import LIGHTEST
from deepspeed_recipes.training.callbacks import layer_stats
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.ranks import read_logs, run_on
from tests.small import small
from tests.test_report import Page, a_run

EVEN = {"embed": 1.0, **{f"layers.{index}": 1.0 + index / 10 for index in range(5)}, "norm": 1e-6}


def test_layers_are_compared_with_those_that_are_like_them():
    assert layer_stats.verdicts(EVEN, {}) == {}, "an embedding and a norm are of other sizes"
    assert layer_stats.verdicts(EVEN | {"layers.0": 1e-4}, {}) == {"layers.0": "vanishing"}
    assert layer_stats.verdicts(EVEN | {"layers.0": 0.0}, {}) == {"layers.0": "vanishing"}
    assert layer_stats.verdicts(EVEN | {"layers.4": 200.0}, {}) == {"layers.4": "exploding"}
    assert layer_stats.verdicts({"layers.0": 1.0, "layers.1": 1e9}, {}) == {}, "which of two is the odd one?"


def test_a_layer_is_compared_with_its_own_past():
    past = {"embed": [0.5, 2.0, 1.0, 1.0, 1.0]}
    assert layer_stats.verdicts({"embed": 19.0}, past) == {}
    assert layer_stats.verdicts({"embed": 21.0}, past) == {"embed": "exploding"}
    assert layer_stats.verdicts({"embed": 21.0}, {"embed": past["embed"][:4]}) == {}, "too few to know"


def test_what_is_known_of_some_weights_only_is_left_out():
    sums = {"all": [4.0, 1.0, 8.0, 1.0, 25.0, 8.0], "half": [4.0, 0.0, 8.0, 1.0, 25.0, 4.0], "frozen": [0.0] * 6}
    found = layer_stats.numbers(sums, unclipped=3.0)
    assert found == {
        "all": {"grad_norm": 6.0, "update_ratio": 0.2, "dead": 0.125},
        "half": {"grad_norm": 6.0, "dead": 0.0},
    }
    fresh = layer_stats.numbers({"new adapter": [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]}, 1.0)
    assert fresh == {"new adapter": {"grad_norm": 1.0, "dead": 0.0}}


@pytest.mark.parametrize("piece", [3, 2**24])
def test_adams_update_is_found_again(monkeypatch, piece):
    monkeypatch.setattr(layer_stats, "PIECE", piece)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 5))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.3, betas=(0.8, 0.95))
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(4, 5)
        weight.grad[0, :2] = 0
        optimizer.step()
    one = layer_stats.holdings.Fragment("layer", 0, 20)
    sums = sum(layer_stats._sums(weight, optimizer, optimizer.param_groups[0], one)).tolist()
    moved = (weight.detach() - before).double().norm() ** 2
    expected = [weight.grad.double().norm() ** 2, 2, 20, moved, before.double().norm() ** 2, 20]
    assert sums == pytest.approx([float(value) for value in expected], rel=1e-5)


@pytest.mark.every
@pytest.mark.parametrize("wanted", [None, False])
def test_a_layer_that_learns_nothing_is_named(ranks, tmp_path, model_folder, conversations, wanted):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.config.num_hidden_layers, model.config.layer_types = 4, model.config.layer_types * 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model.config)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight *= 1e5  # beside its output, that of layer 3 is nothing
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path / "model")
    run = run_on(
        ranks, small(tmp_path / "model", conversations, "zero2.json", max_steps=3, layer_stats=wanted), tmp_path
    )
    rows, said = read_jsonl(run.metrics), read_logs(tmp_path / "log")[0]
    if wanted is False:
        assert not any("layers" in row for row in rows) and "vanishing" not in said
        return
    verdicts = {name: one["verdict"] for name, one in rows[0]["layers"].items() if "verdict" in one}
    assert verdicts == {"model.layers.3": "vanishing"}
    assert said.count("vanishing gradient in model.layers.3: its norm is") == 1, "said once"


@pytest.fixture
def run(tmp_path):
    run = a_run(tmp_path / "run", steps=3)
    rows = read_jsonl(run.metrics)
    run.metrics.unlink()
    for row in rows:
        layers = {
            f"model.layers.{layer}": {"grad_norm": (layer + 1) / row["step"], "update_ratio": 1e-3, "dead": 0.25}
            for layer in range(3)
        }
        layers["model.layers.1"]["verdict"] = "vanishing"
        append_jsonl(run.metrics, row | {"layers": layers})
        for rank in range(2):
            sample = {"time": 1.7e9 + 5 * row["step"], "node": "n0", "rank": rank, "step": row["step"]}
            sample |= {"gpu_utilization": 90 + rank, "pcie_sent_bytes_per_second": 2.5e9} | {"cpu_utilization": 50.0}
            append_jsonl(run.system if rank == 0 else run.system_of(rank), sample)
    return run


def test_the_report_shows_layers_and_hardware(run, capsys):
    document = write.document(run_data.read(run.path))
    page = write.render(document)
    found = Page(page)
    assert re.findall(r"<h2>(Layers|Hardware in use)</h2>", page) == ["Layers", "Hardware in use"]
    numbers = {source: value for source, value, _ in found.numbers}
    assert numbers["metrics.jsonl:3:layers:model.layers.2:grad_norm"] == 1.0
    assert numbers["system.jsonl:mean:gpu_utilization:rank 1"] == 91
    assert numbers["system.jsonl:highest:pcie_sent_bytes_per_second:rank 0"] == 2.5
    cells = [shown for shown in re.findall(r"<rect[^>]*><title>([^<]*)", page)]
    assert len(cells) == 2 * 3 * 3 and "model.layers.2, step 2: 1.5" in cells
    assert "Vanishing gradient in model.layers.1: in 3 of 3 logs, first at 1." in page
    assert "layers" not in re.findall(r"<th>(.*?)</th>", page), "not a column of the numbers behind the curves"
    text.show(document)
    shown = capsys.readouterr().out
    assert "LAYERS" in shown and re.search(r"model\.layers\.2\s+\S+\s+3 -> 1\n", shown), shown


def test_updates_without_any_gradient_are_in_the_report(run):
    rows = read_jsonl(run.metrics)
    run.metrics.unlink()
    for row in rows:
        zero = {"grad_norm": 0.0, "update_ratio": 0.0, "dead": 1.0}
        layers = {name: zero if row["step"] > 1 else one for name, one in row["layers"].items()}
        append_jsonl(run.metrics, row | {"layers": layers})
    page = write.render(write.document(run_data.read(run.path)))
    assert "The gradient of every layer is zero in 2 of 3 logs, first at step 2: these updates" in page
    assert "has vanished or exploded" not in page


def test_darker_is_larger_and_an_empty_cell_has_no_number(run):
    block = next(
        one
        for section in write.document(run_data.read(run.path)).sections
        for one in section.blocks
        if type(one).__name__ == "HeatMap"
    )
    shade = {label: [float(opacity) for _, opacity, _ in cells] for label, cells in block.shades()}
    assert shade["model.layers.2"][0] == 1.0 and shade["model.layers.0"][-1] == LIGHTEST
    assert shade["model.layers.1"] == sorted(shade["model.layers.1"], reverse=True)


def test_damaged_numbers_of_layers_and_samples_leave_the_rest(run):
    append_jsonl(run.metrics, {"step": 4, "loss": 1.0, "layers": {"a<b": {"grad_norm": "x"}, "c": 5}})
    append_jsonl(run.system, {"time": "x", "rank": 0})
    append_jsonl(run.system, {"time": 1.8e9, "rank": 0, "gpu_utilization": "<b>"})
    page = write.render(write.document(run_data.read(run.path)))
    assert "a&lt;b" in page and "Hardware in use" in page and "<b>" not in page
