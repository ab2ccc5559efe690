"""Where a run ends and what it exports: early stopping and the best step, compared with plain PyTorch."""

import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.launching import restarts
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.recipe import Layout, Lora
from deepspeed_recipes.recipe.run_folder import (
    RunFolder,
    checkpoints,
    forget_after,
    newest_checkpoint,
    read_json,
    read_jsonl,
    read_recipe,
    step_of,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import lora as adapters
from tests.conftest import conversation, write_rows
from tests.parity import gate, plain
from tests.ranks import read_logs, run_on
from tests.tiers import tiered
from tests.workers.quick_launch import quick_launch

SETTINGS = plain.Settings(steps=12)
CASES = {
    **{f"zero{stage}": (f"zero{stage}.json", {}) for stage in range(4)},
    "ties": ("zero1.json", {}),  # no answer is ever right, so the loss decides
    "pipeline": ("pipeline.json", {"layout": Layout(pipeline=2)}),
    "tensor": ("zero1.json", {"layout": Layout(tensor=2)}),
    "lora_zero3": ("zero3.json", {"lora": Lora(rank=16, alpha=128)}),  # learns fast enough to overfit
    "offload": ("zero3_offload.json", {}),
}
PATIENCE = 3
EVENTS = ("on_step_end", "on_evaluate", "on_save")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Write conversations that a model which learns the others gets worse at, after it got better."""
    path = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    rows = [(n, " ".join(str(i) for i in range(n, 0, -1))) for n in (3, 6, 9, 12)]
    return write_rows(path, [conversation(f"Count down from {n}.", answer) for n, answer in rows])


class Watching:
    """AdamW that measures the held-out examples after each step."""

    def __init__(self, held_out, losses, model, settings):
        self.optimizer, self.model, self.settings = plain.adamw(model, settings), model, settings
        self.held_out, self.losses = held_out, losses

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            sums = [plain.summed_loss(self.model, *one, self.settings) for one in self.held_out]
        self.losses.append(float(sum(total for total, *_ in sums) / sum(count for _, count, _ in sums)))


@pytest.fixture(scope="module")
def reference(model_folder, conversations, held_out):
    """Return a function of a number of steps, and LoRA's settings or None: held-out losses and weights after them."""

    @cache
    def train(steps, lora=None):
        losses = []
        examples = plain.examples(held_out, AutoTokenizer.from_pretrained(model_folder), SETTINGS)
        _, weights = plain.train(
            model_folder,
            conversations,
            replace(SETTINGS, steps=steps),
            prepare=(lambda model: adapters.add(model, lora, 42)) if lora else lambda model: model,
            optimize=lambda model, settings: Watching(examples, losses, model, settings),
        )
        return losses, weights

    return train


def decided(losses, patience, resets=True):
    """Return the step that ends the run and the best step; a mistake is a count that does not begin again."""
    best, bad = 0, 0
    for at, loss in enumerate(losses):
        if loss < losses[best] or at == 0:
            best, bad = at, 0 if resets else bad
        else:
            bad += 1
        if bad == patience:
            return at + 1, best + 1
    return len(losses), best + 1


def recipe_of(case, model_folder, conversations, held_out, **changes):
    config, more = CASES[case]
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, config, save_steps=1, **more)
    metric = "exact_match" if case == "ties" else "loss"
    recipe = replace(recipe, data=replace(recipe.data, validation=str(held_out), metric=metric))
    return replace(recipe, early_stopping=PATIENCE, keep_best=True, **changes)


@pytest.fixture(scope="module")
def finished(ranks, tmp_path_factory, model_folder, conversations, held_out):
    """Return a case's run and what rank 0 printed; each is trained once."""

    @cache
    def train(case):
        folder = tmp_path_factory.mktemp(case)
        run = run_on(ranks, recipe_of(case, model_folder, conversations, held_out), folder)
        return run, read_logs(folder / "log")[0]

    return train


def agrees(run, case, reference):
    """Fail unless the run ended, and exported, where plain PyTorch would."""
    lora = CASES[case][1].get("lora")
    losses, _ = reference(SETTINGS.steps, lora)
    last, best = decided(losses, PATIENCE)
    assert best < last < SETTINGS.steps
    rows = [row for row in read_jsonl(run.evaluations) if "exported" not in row]
    assert [row["step"] for row in rows] == list(range(last + 1))
    assert [row["loss"] for row in rows[1:]] == pytest.approx(losses[:last], rel=gate.LOSS)
    summary = read_json(run.summary)
    assert summary["steps"] == last and summary["exported_step"] == best
    after, judged = (0.0, "exact match (ties: by loss)") if case == "ties" else (losses[best - 1], "loss")
    assert summary["after"] == pytest.approx(after, rel=gate.LOSS)
    assert summary["stopped_early"].startswith(f"after step {last} of {SETTINGS.steps}: no better {judged} than that ")
    _, weights = reference(best, lora)
    if lora:
        from safetensors.torch import load_file

        exported = load_file(run.export / "adapter_model.safetensors")
        weights = {name.replace(".default", ""): weight for name, weight in weights.items() if "lora_" in name}
    else:
        exported = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.float32).state_dict()
    assert set(exported) == set(weights)
    assert max(plain.worst(weight, weights[name]) for name, weight in exported.items()) <= 1
    if not lora:
        _, others = reference(last)
        assert max(plain.worst(weight, others[name]) for name, weight in exported.items()) > 10


@pytest.mark.parametrize("case", tiered(CASES, {"zero1", "pipeline"}))
def test_a_run_ends_and_exports_where_plain_pytorch_would(finished, reference, case):
    run, screen = finished(case)
    agrees(run, case, reference)
    last, best = decided(reference(SETTINGS.steps, CASES[case][1].get("lora"))[0], PATIENCE)
    # The two newest, and the best.
    assert [step_of(one) for one in checkpoints(run)] == [last, last - 1, best]
    assert f"stopping early after step {last} of {SETTINGS.steps}" in screen
    assert re.search(rf"exported     step {best}, the best by (loss|exact match \(ties: by loss\))", screen)


@pytest.mark.parametrize("resumed_by", [2, pytest.param(1, marks=pytest.mark.every)])
@pytest.mark.parametrize("case", tiered(CASES, {"zero1"}))
def test_an_interrupted_run_ends_there_too(ranks, tmp_path, finished, reference, case, resumed_by):
    """The best step and the count are those of before, with another number of ranks too."""
    if resumed_by == 1 and case in ("pipeline", "tensor"):
        pytest.skip("needs two ranks")
    before, _ = finished(case)
    run = RunFolder(tmp_path / "run")
    shutil.copytree(before.path, run.path)
    shutil.rmtree(checkpoints(run)[0])  # killed after the evaluation, before its checkpoint was complete
    shutil.rmtree(run.export)
    run.summary.unlink()
    restarts.prepare(read_recipe(run), run, resumed_by, newest_checkpoint(run))
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log", world_size=resumed_by)
    agrees(run, case, reference)


KILLS = """
import os, signal
from transformers import TrainerCallback

class Mine(TrainerCallback):
    def {}(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == {}:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("event", "after_best"), tiered([(event, step) for event in EVENTS for step in (0, 1, 3)], {("on_evaluate", 1)})
)
def test_a_killed_run_resumes_with_a_corrected_file_and_ends_there_too(
    ranks, tmp_path, model_folder, conversations, held_out, reference, event, after_best
):
    """The launcher names the file that changed; the step after which a rank dies may be the best or the last one."""
    _, best = decided(reference(SETTINGS.steps)[0], PATIENCE)
    file, run = tmp_path / "mine.py", RunFolder(tmp_path / "run")
    file.write_text(KILLS.format(event, best + after_best), encoding="utf-8")
    page = pages.find("tiny", "full")
    recipe = recipe_of("zero1", model_folder, conversations, held_out, callbacks=f"{file}:Mine")
    flags = ["tiny", "full", "--gpus", "2", "--output-dir", str(run.path)]

    def launch(name, *words):
        process = ranks.context.Process(target=quick_launch, args=([*flags, *words], str(tmp_path / name)))
        process.start()
        process.join(240)
        return process.exitcode, (tmp_path / name).read_text(encoding="utf-8")

    status, said = launch("killed", *overrides.differences(page, recipe))
    assert status not in (0, 2) and "rank 1" in said and "was killed by SIGKILL" in said
    file.write_text(KILLS.format(event, -1), encoding="utf-8")
    status, said = launch("resumed", "--resume", f"callbacks={file}:Mine")
    assert status == 0 and f"resuming with a changed file: callbacks={file}:Mine (SHA-256 " in said, said
    agrees(run, "zero1", reference)


@pytest.mark.every
def test_an_interrupted_export_trains_no_more_and_forgotten_evaluations_are_noticed(ranks, tmp_path, finished):
    before, _ = finished("zero1")
    for forgets in (False, True):
        run = RunFolder(tmp_path / f"run-{forgets}")
        shutil.copytree(before.path, run.path)
        shutil.rmtree(run.export)
        forget_after(run, newest_checkpoint(run))
        if forgets:
            run.evaluations.unlink()
            run.evaluations.write_text('{"step": 0, "loss": 9.0}\n')
        ranks.check(training_run.main, str(run.path), log=tmp_path / f"log-{forgets}")
        ended, was = read_json(run.summary), read_json(before.summary)
        assert (ended["steps"] == was["steps"]) != forgets
        assert (ended["exported_step"] == was["exported_step"]) != forgets


def test_a_count_that_does_not_begin_again_is_noticed(reference):
    losses, _ = reference(SETTINGS.steps)
    assert decided(losses, PATIENCE) != decided(losses, PATIENCE, resets=False)
