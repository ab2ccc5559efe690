"""The user's own code: what is refused before a rank starts, and what errors name."""

from dataclasses import replace

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from deepspeed_recipes.commands.launch import plan
from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.launching.options import LaunchOptions
from deepspeed_recipes.recipe import own_code as named
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.limits import tiles_loss
from deepspeed_recipes.recipe.overrides import apply
from deepspeed_recipes.recipe.run_folder import RunFolder
from deepspeed_recipes.training import own_code
from deepspeed_recipes.training.data import sources

CODE = """
import math, torch
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

def right(answers, references): return sum(map(str.__eq__, answers, references)) / len(answers)
def both(answers, references): return {"right": right(answers, references), "n": torch.tensor(len(answers))}
def text(answers, references): return "good"
def undefined(answers, references): return math.nan
def fails(answers, references): return answers[9]
def one(answers): return 1.0
async def later(answers, references): return 1.0

def summed(outputs, labels, num_items_in_batch):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum") / num_items_in_batch
def of_logits(logits, labels, num_items_in_batch): return summed(CausalLM(logits), labels, num_items_in_batch)
class CausalLM:
    def __init__(self, logits): self.logits = logits
def mean(outputs, labels, **more): return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
def detached(outputs, labels, num_items_in_batch): return summed(outputs, labels, num_items_in_batch).detach()
def matrix(outputs, labels, num_items_in_batch): return outputs.logits
def number(outputs, labels, num_items_in_batch): return 1.0
def infinite(outputs, labels, num_items_in_batch): return outputs.logits.sum() * math.inf
def no_count(outputs, labels): return 1.0
def of_trainer(model, inputs, return_outputs=False, num_items_in_batch=None): return 1.0

def kept(example): return {"text": example["text"].upper()} if "a" in example["text"] else None
def none(example): return None
def words(example): return example["text"].split()
def key(example): return {"text": example["txt"]}

class Fine(TrainerCallback):
    def on_predict(self, args, state, control, **kwargs): pass
    def on_optimizer_step(self, args, state, control, **kwargs): pass
    def on_log(self, args, state, control, logs=None, **kwargs): logs["twice"] = 2 * logs["loss"]
class Divides(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs): 1 / 0
class Wants(TrainerCallback):
    def __init__(self, size): pass
class Other: pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "mine.py"
    path.write_text(CODE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tiny():
    return pages.find("tiny", "full")


def line_of(text):
    return next(number for number, line in enumerate(CODE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("data.metric=bleu", "must be one of loss, exact_match, .*or FILE.py:FUNCTION"),
        ("data.metric=mine.py", "write FILE.py:FUNCTION"),
        ("callbacks=a.py:F,b.py:F", "two have the same name"),
        ("data.metric=loss,a.py:loss", "two metrics have the same name"),
        ("loss=a.py:f,a.py:g", "must be one function"),
        ("callbacks=a.py", "write FILE.py:CLASS"),
        ("code=a", "cannot be overridden"),
        ("compute_metrics=a", "use 'data.metric'"),
        ("compute_loss_func=a", "use 'loss'"),
        ("preprocessing=a", "use 'data.transform'"),
    ],
)
def test_what_names_no_code_is_refused(tiny, setting, why):
    with pytest.raises(UserError, match=why):
        apply(tiny, [setting])


@pytest.mark.parametrize(
    ("variant", "settings", "why"),
    [
        ("full", ["loss=a.py:f", "layout.pipeline=2"], "only the last stage has logits.*use layout.pipeline=1"),
        ("full", ["loss=a.py:f", "layout.tensor=2"], "splits matrices.*use layout.tensor=1"),
        ("full", ["loss=a.py:f", "layout.sequence=2"], "a part of every sequence.*use layout.sequence=1"),
        ("full", ["loss=a.py:f", "tiled_loss=true"], "never holds the whole logits.*use tiled_loss=false"),
        ("full", ["loss=a.py:f", "router_aux_loss_coef=0.1"], "which the function replaces"),
        ("dpo_lora", ["loss=a.py:f"], "DPO has a loss of its own.*leave loss out"),
        ("distill", ["loss=a.py:f"], "compares with the teacher"),
        ("full", ["data.metric=a.py:f", "layout.pipeline=2"], "a pipeline cannot generate"),
        ("full", ["data.metric=loss,preference_accuracy"], "fine-tuning measures loss and exact_match, not preference"),
        ("kto_lora", ["data.metric=preference_accuracy"], "KTO measures loss and judgement_accuracy, not preference"),
        ("classify", ["data.metric=exact_match"], "measures loss and accuracy, not exact_match"),
        ("dpo_lora", ["data.metric=a.py:f"], "DPO is not trained on answers that the model writes"),
        ("pretrain", ["data.metric=a.py:f"], "not trained on answers"),
    ],
)
def test_combinations_are_refused_with_the_reason(variant, settings, why):
    with pytest.raises(UserError, match=why):
        apply(pages.find("tiny", variant), settings)


def test_a_loss_turns_tiles_off_that_were_only_automatic(tiny):
    assert tiles_loss(tiny, 2**20) and not tiles_loss(apply(tiny, ["loss=a.py:f"]), 2**20)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("data.metric={}:gone", "no function of that name in the file; it defines right, both"),
        ("data.metric={}:one", r"must take two arguments, .*`def one\(answers, references\)`"),
        ("data.metric={}:later", "must not be async"),
        ("loss={}:no_count", "must take three arguments"),
        ("loss={}:of_trainer", r"must take three arguments.*`def of_trainer\(outputs, labels, num_items_in_batch\)`"),
        ("callbacks={}:right", "no class of that name in the file; it defines CausalLM, Fine"),
        ("data.transform={}:right", r"must take one argument.*`def right\(example\)`"),
    ],
)
def test_a_file_is_checked_without_running_it(tiny, file, setting, why):
    recipe = paths.locate(apply(tiny, [setting.format(file)]))
    with pytest.raises(UserError, match=why):
        preflight.check_data(recipe)


def test_files_are_found_from_the_current_folder_and_have_a_digest(tiny, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    recipe = paths.locate(apply(tiny, ["loss=mine.py:summed", "data.metric=exact_match,mine.py:right"]))
    assert recipe.loss == f"{file}:summed" and recipe.data.metric == f"exact_match,{file}:right"
    assert recipe.metric == "exact_match" and recipe.data.metrics == ["exact_match", "right"]
    assert set(recipe.code) == {"loss", "data.metric"} and len(recipe.code["loss"]) == 64
    (line,) = named.changed(recipe, {**recipe.code, "loss": "0" * 64}, recipe.code)
    assert line.startswith(f"loss={file}:summed (SHA-256 000000000000, now {recipe.code['loss'][:12]}")
    with pytest.raises(UserError, match="the file is not the one that was launched"):
        list(own_code.check(replace(recipe, code={**recipe.code, "loss": "0" * 64})))
    with pytest.raises(UserError, match=r"loss=gone.py: no such file"):
        paths.locate(apply(tiny, ["loss=gone.py:f"]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("detached", "returned a tensor without a gradient; compute it from the logits"),
        ("matrix", r"returned a tensor of shape \[2, 8, 32\]; return a scalar tensor"),
        ("number", "returned float; return a scalar tensor"),
        ("infinite", "returned -?(inf|nan) for random logits"),
        ("no_count", "cannot be called as in `def no_count"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(tiny, file, name, why):
    with pytest.raises(UserError, match=rf"loss={file}:{name}: .*{why}"):
        own_code.Loss(replace(tiny, loss=f"{file}:{name}")).tried(None)


def test_a_loss_gets_what_transformers_gives_it(tiny, file):
    found = [own_code.Loss(replace(tiny, loss=f"{file}:{name}")).tried(50) for name in ("summed", "of_logits", "mean")]
    assert found[0] == found[1] and [ignores for _, ignores in found] == [False, False, True]
    warnings = list(own_code.check(replace(tiny, loss=f"{file}:mean")))
    assert "ignores num_items_in_batch" in warnings[0] and not list(
        own_code.check(replace(tiny, loss=f"{file}:summed"))
    )
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    loss = own_code.Loss(replace(tiny, loss=f"{file}:summed"))(
        CausalLMOutput(logits=logits), torch.ones(1, 3).long(), 2
    )
    assert loss.item() == pytest.approx(torch.tensor(4.0).log().item())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("text", "returned a str; a number is expected"),
        ("undefined", "returned nan; a finite number is expected"),
        ("fails", rf"IndexError: list index out of range \(.*mine.py:{line_of('def fails')}\)"),
    ],
)
def test_a_metric_that_is_no_number_is_refused(tiny, file, name, why, tmp_path, monkeypatch):
    recipe = replace(tiny, data=replace(tiny.data, metric=f"{file}:{name}"))
    monkeypatch.setattr(own_code, "newest_checkpoint", lambda run: run.checkpoints / "checkpoint-3")
    for run in (None, RunFolder(tmp_path)):
        with pytest.raises(UserError, match=rf"data.metric={file}:{name}.*{why}") as caught:
            own_code.measured(recipe, ["a", "b"], ["a", "c"], run)
        assert len(str(caught.value).splitlines()) <= 3
    assert str(caught.value).endswith("checkpoint-3 is kept; correct the file, and add --resume.")


def test_a_metric_returns_a_number_or_several(tiny, file):
    recipe = replace(tiny, data=replace(tiny.data, metric=f"loss,{file}:right,{file}:both"))
    found = own_code.measured(recipe, ["a", "b"], ["a", "c"])
    assert found == {"right": 0.5, "both": 0.5, "both_right": 0.5, "both_n": 2.0}


def test_a_transform_changes_drops_and_names_its_mistakes(file):
    rows = [("f:1", {"text": "a"}), ("f:2", {"text": "b"}), ("f:3", {"text": "aa"})]
    dropped = []
    assert list(named.transformed(rows, f"{file}:kept", lambda: dropped.append(1))) == [
        ("f:1", {"text": "A"}),
        ("f:3", {"text": "AA"}),
    ]
    assert len(dropped) == 1 and list(named.transformed(rows, None)) == rows
    with pytest.raises(UserError, match=r"f:1: data.transform=.*:words: returned a list; return the example as a dict"):
        list(named.transformed(rows, f"{file}:words"))
    with pytest.raises(UserError, match=rf"f:1: data.transform=.*KeyError: 'txt' \(.*:{line_of('def key')}\)"):
        list(named.transformed(rows, f"{file}:key"))


def test_dropped_examples_are_counted_wherever_they_are(file, tmp_path):
    data = tmp_path / "texts.jsonl"
    rows = ["b", "b", "a1", "b", "a2", "b"]
    data.write_text("".join(f'{{"text": "{text}"}}\n' for text in rows), encoding="utf-8")
    recipe = apply(pages.find("tiny", "pretrain"), [f"data.path={data}", f"data.transform={file}:kept"])
    (source,) = sources.read(str(data), recipe)
    assert (source.dropped, source.examples["text"][:]) == (4, ["A1", "A2"])
    assert source.line().endswith("2 examples in the form text; 4 dropped by data.transform")
    (stream,) = sources.read(str(data), recipe, streaming=True)
    assert [row["text"] for row in stream.examples] == ["A1", "A2"]
    nothing = apply(recipe, [f"data.transform={file}:none"])
    with pytest.raises(UserError, match=r"contains no examples that data.transform=.*:none keeps"):
        sources.read(str(data), nothing)


def test_another_content_of_the_file_is_other_data(file, tmp_path):
    data, code = tmp_path / "texts.jsonl", tmp_path / "change.py"
    data.write_text('{"text": "a"}\n', encoding="utf-8")
    recipe = apply(pages.find("tiny", "pretrain"), [f"data.path={data}", f"data.transform={code}:change"])
    for word in ("one", "two"):
        named._module.cache_clear()
        code.write_text(f'def change(example): return {{"text": "{word}"}}\n', encoding="utf-8")
        assert sources.read(str(data), recipe)[0].examples["text"][:] == [word], "not from the cache"


def test_callbacks_report_their_line_and_what_they_log(tiny, file):
    added = set()
    recipe = replace(tiny, callbacks=f"{file}:Fine,{file}:Divides")
    fine, divides = own_code.callbacks(recipe, added=added)
    logs, state = {"loss": 1.5}, type("State", (), {"global_step": 100})
    fine.on_log(None, state, None, logs=logs)
    assert (logs, added, type(fine).__name__) == ({"loss": 1.5, "twice": 3.0}, {"twice"}, "Fine")
    where = rf"on_step_end at step 100: ZeroDivisionError: division by zero \({file}:{line_of('1 / 0')}\)"
    with pytest.raises(UserError, match=where):
        divides.on_step_end(None, state, None)
    never, late = own_code.check(recipe)
    assert "on_predict is never called" in never and "on_optimizer_step come after the update" in late


@pytest.mark.parametrize(
    ("name", "why"),
    [("Other", "is not a subclass of transformers.TrainerCallback"), ("Wants", "cannot be created without arguments")],
)
def test_a_class_that_is_no_callback_is_refused(tiny, file, name, why):
    with pytest.raises(UserError, match=rf"callbacks={file}:{name}: {why}"):
        own_code.callbacks(replace(tiny, callbacks=f"{file}:{name}"))


@pytest.mark.slow  # imports torch
def test_the_launcher_tries_the_code_in_a_process_of_its_own(tiny, file, tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # without it DeepSpeed prints when it is imported
    right = tmp_path / "right.py"
    right.write_text("import sys\nprint('noise')\nassert 'deepspeed' not in sys.modules\ndef same(one): return one\n")
    assert preflight.check_data(paths.locate(apply(tiny, [f"data.transform={right}:same"]))) == 6000
    wants = tmp_path / "wants.py"
    wants.write_text("print('noise')\nimport no_such_package\ndef score(answers, references): return 1\n", "utf-8")
    recipe = paths.locate(apply(tiny, [f"data.metric={wants}:score"]))
    with pytest.raises(UserError) as caught:
        preflight.check_data(recipe)
    first, second = str(caught.value).splitlines()
    assert first.endswith(f"cannot be loaded: ModuleNotFoundError: No module named 'no_such_package' ({wants}:2);")
    assert second == "install no_such_package in this environment, or leave the setting out."


def test_a_run_folder_alone_permits_no_code(tiny, file, monkeypatch):
    held = paths.locate(apply(tiny, [f"loss={file}:summed"]))
    monkeypatch.setattr(plan.run_folder, "read_recipe", lambda folder: held)
    monkeypatch.setattr(plan.run_lock, "check", lambda path: None)
    folder = plan.RunFolder(file.parent)
    with pytest.raises(UserError, match=r"loss=.*: refusing to run code named only in a run folder; .*add loss=..."):
        plan.resumed(tiny, folder, LaunchOptions(recipe="tiny", variant="full"))
    allowed = LaunchOptions(recipe="tiny", variant="full", overrides=(f"loss={file}:summed",))
    assert plan.resumed(tiny, folder, allowed).loss == held.loss
