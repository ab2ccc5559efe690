"""The methods on TRL's trainers: on two ranks, whatever the ZeRO stage, what TRL trains alone without DeepSpeed."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.data_loader import BatchSamplerShard
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Dpo
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_json
from deepspeed_recipes.training.data import collate
from deepspeed_recipes.training.methods import preferences
from deepspeed_recipes.training.trainer import RunHooks
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import own_code, trl_alone

SETTINGS = trl_alone.SETTINGS
NOTICED = 100 * gate.LOSS
"""The mistakes below differ by more."""


@pytest.fixture(scope="module")
def examples(pairs, judged):
    """Return the examples of each method."""
    return {method: judged if method == "kto" else pairs for method in trl_alone.METHODS}


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory, model_folder, examples):
    """Return a function that trains with TRL alone, once for each case."""

    @cache
    def trained(method: str, lora: bool, mistake: str = "") -> gate.Reference:
        output = tmp_path_factory.mktemp(f"{method}-alone")
        arguments = (method, str(model_folder), str(examples[method]), str(output), lora, mistake)
        ranks.check(trl_alone.train, *arguments, log=output / "log", world_size=1)
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        return gate.Reference(
            json.loads((output / "records.json").read_text()), load_file(output / name), events(output)
        )

    return trained


def events(folder):
    """Return what a callback has recorded on rank 0, without the ends of passes, whose number may differ."""
    found = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    return [one for one in found if one[0] != "on_substep_end"]


CASES = [(method, stage, lora) for method in trl_alone.METHODS for stage in range(4) for lora in (False, True)]
CORE = {("dpo", 3, False), ("kto", 2, True)}


@pytest.mark.parametrize(("method", "stage", "lora"), tiered(CASES, CORE))
def test_same_model_as_trl_alone(ranks, tmp_path, model_folder, examples, alone, method, stage, lora):
    recipe = gate.recipe_for(
        SETTINGS,
        model_folder,
        examples[method],
        f"zero{stage}.json",
        method=method,
        lora=trl_alone.ADAPTERS if lora else None,
        micro_batch_size=4 if method == "kto" else 2,  # with fewer, other answers estimate the KL
        callbacks=f"{own_code.__file__}:Recorder",
    )
    run = run_on(ranks, recipe, tmp_path, function=own_code.train, words=[str(tmp_path)])

    reference = alone(method, lora)
    gate.agree_on_steps(run, reference.records)
    assert events(tmp_path) == reference.events and (tmp_path / "rank-1.jsonl").exists(), "every rank calls it"
    assert all(row["loss_in_bits"] == pytest.approx(row["loss"] / math.log(2)) for row in read_jsonl(run.metrics))
    exported = load_file(run.export / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert set(exported) == set(reference.weights)
    gate.near(exported, reference.weights)
    assert read_json(run.deepspeed)["zero_optimization"]["stage"] == stage
    for ours, theirs in zip(read_jsonl(run.metrics), reference.records, strict=True):
        for name, of_trl in NUMBERS[method].items():
            assert ours[name] == pytest.approx(theirs[of_trl], rel=1e-3, abs=1e-5), name


PAIRS = [method for method in trl_alone.METHODS if method != "kto"]  # which drops what fills no micro-batch


@pytest.mark.parametrize(
    ("method", "count", "micro_batch_size", "stage"),
    tiered(
        [(method, *sizes, 2) for method in PAIRS for sizes in ((7, 2), (5, 2), (1, 1))] + [("dpo", 7, 2, 3)],
        {("dpo", 7, 2, 3)},
    ),
)
def test_each_pair_of_an_epoch_that_ranks_cannot_share_evenly_counts_the_same(
    ranks, tmp_path, model_folder, pairs, method, count, micro_batch_size, stage
):
    """Every step is an epoch of fewer pairs than a global batch: one rank has fewer of them, or none."""
    data, output = tmp_path / "few.jsonl", tmp_path / "alone"
    data.write_text("".join(pairs.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
    ranks.check(trl_alone.train, method, str(model_folder), str(data), str(output), False, log=output, world_size=1)
    run = run_on(
        ranks,
        gate.recipe_for(
            SETTINGS, model_folder, data, f"zero{stage}.json", method=method, micro_batch_size=micro_batch_size
        ),
        tmp_path,
    )
    records = json.loads((output / "records.json").read_text())
    gate.agree_on_steps(run, records)
    expected = load_file(output / "model.safetensors")
    for name, weight in load_file(run.export / "model.safetensors").items():
        assert plain.worst(weight, expected[name]) <= 1, name
    if method != "dpo":  # whose numbers TRL averages over micro-batches
        for ours, theirs in zip(read_jsonl(run.metrics), records, strict=True):
            for name, of_trl in NUMBERS[method].items():
                assert ours[name] == pytest.approx(theirs[of_trl], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 6, 7, 8, 11])
def test_ranks_pass_equally_many_pairs_of_dpo_at_a_time(monkeypatch, count, micro_batch_size):
    """TRL gathers a number of each pair at every pass, so that other sizes would hang or mix up ranks."""
    passes, values = [], torch.arange(1.0, count + 1)

    def mean(trainer, model, inputs):
        passes[-1].append(len(inputs["ref_chosen_logps"]))
        return inputs["ref_chosen_logps"].mean()

    monkeypatch.setattr(trl.DPOTrainer, "compute_loss", mean)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    recipe = SimpleNamespace(
        global_batch_size=8, micro_batch_size=micro_batch_size, layout=Layout(), router_aux_loss_coef=0
    )
    context = SimpleNamespace(recipe=recipe, phases=SimpleNamespace(phase=lambda _: nullcontext()))
    batches = collate.EvenBatches(SequentialSampler(range(count)), micro_batch_size, 2)
    shares = [[*BatchSamplerShard(batches, 2, rank, even_batches=False)] for rank in range(2)]
    each = 8 // micro_batch_size // 2
    for step in range(-(-count // 8)):
        passes.clear()
        found = 0.0
        for share in shares:
            passes.append([])
            trainer = preferences.RunDPOTrainer.__new__(preferences.RunDPOTrainer)
            vars(trainer).update(context=context, state=SimpleNamespace(global_step=step), noise=None)
            trainer.train_dataset = range(count)
            numbers = share[step * each : (step + 1) * each]
            made = [dict.fromkeys(preferences.REFERENCE, values[[max(at, 0) for at in one]]) for one in numbers]
            made = [one | {"input_ids": torch.zeros(2 * len(own), 3)} for one, own in zip(made, numbers, strict=True)]
            for inputs, own in zip(trainer.prepare_step(made, None)[0], numbers, strict=True):
                trainer.filler, trainer.one_by_one = own[0] < 0, inputs.pop(preferences.UNEVEN, False)
                found += trainer.compute_loss(None, inputs) / len(made) / 2
        assert passes[0] == passes[1]
        assert found.item() == pytest.approx(values[8 * step : 8 * (step + 1)].mean().item())


CASES = [(stage, lora, broken) for stage in range(4) for lora in (False, True) for broken in (False, True)]


@pytest.mark.parametrize(("stage", "lora", "broken"), tiered(CASES, ()))
def test_a_reference_that_is_computed_once_trains_the_same_model(
    ranks, tmp_path, model_folder, pairs, alone, stage, lora, broken
):
    recipe = gate.recipe_for(SETTINGS, model_folder, pairs, f"zero{stage}.json", method="dpo", save_steps=3 * broken)
    adapters = trl_alone.ADAPTERS if lora else None
    recipe = replace(recipe, lora=adapters, micro_batch_size=2, method=Dpo(precompute=True))
    run = (gate.run_with_a_break if broken else run_on)(ranks, recipe, tmp_path)
    gate.agree_on_steps(run, alone("dpo", lora).records)
    exported = load_file(run.export / ("adapter_model.safetensors" if lora else "model.safetensors"))
    gate.near(exported, alone("dpo", lora).weights)
    assert len(read_json(run.reference)) == 8


def test_a_reference_of_other_pairs_is_refused(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    write_json(run.reference, [[-1.0, -2.0]] * 7)
    monkeypatch.setattr(RunHooks, "on_engine_ready", lambda _: None)
    trainer = object.__new__(preferences.RunDPOTrainer)
    trainer.precompute_ref_logps, trainer.train_dataset = True, [{}] * 8
    trainer.context = SimpleNamespace(run=run, checkpoint=run.checkpoints / "checkpoint-3")
    with pytest.raises(UserError, match=r"log-probabilities of 7 pairs, and the data has 8; resume with the data"):
        trainer.on_engine_ready()


REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
NUMBERS = {
    "reward": {"rewards/margins": "margin", "rewards/accuracies": "accuracy"},
    "kto": {name: name for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins")},
    "dpo": {name: name for name in REWARDS},
    "orpo": {name: name for name in (*REWARDS, "nll_loss")},
    "simpo": {name: name for name in REWARDS},
}
"""What a run logs besides the loss, and what TRL calls it."""


MISTAKES = {
    "reward": ("label", "head", "center"),
    "kto": ("label", "beta", "order"),
    "dpo": ("label", "beta", "reference"),
    "orpo": ("label", "beta", "length", "batch"),
    "simpo": ("label", "beta", "length", "gamma"),
}


@pytest.mark.parametrize(
    ("method", "mistake"),
    tiered([(method, one) for method in MISTAKES for one in MISTAKES[method]], lambda case: case[0] in ("dpo", "kto")),
)
def test_a_wrong_reference_is_noticed(alone, method, mistake):
    right, wrong = alone(method, False), alone(method, False, mistake)
    assert abs(wrong.records[-1]["loss"] / right.records[-1]["loss"] - 1) > NOTICED
    assert any(plain.worst(wrong.weights[name], weight) > 10 for name, weight in right.weights.items())
