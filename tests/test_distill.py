"""Distillation's parts: divergences, tiles, what is kept of the teacher, and what is refused before it is loaded."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer

from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.planning.cost.memory import peak_memory
from deepspeed_recipes.planning.cost.training_setup import training_setup
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.model_profile.lookup import profile_of
from deepspeed_recipes.recipe import limits, overrides, pages
from deepspeed_recipes.recipe.deepspeed_file import DeepSpeedFile
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Distill
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.recipe import Lora, Schedule
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_json, write_recipe
from deepspeed_recipes.recipe.samples import TINY_MODEL, TINY_TEACHER
from deepspeed_recipes.report.page import Chart
from deepspeed_recipes.report.run_data import read
from deepspeed_recipes.report.sections import curves
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.data import updates
from deepspeed_recipes.training.data.collate import Collator
from deepspeed_recipes.training.data.load import Datasets
from deepspeed_recipes.training.methods import distill
from deepspeed_recipes.training.methods.distill import RunDistillTrainer
from deepspeed_recipes.training.methods.distillation import divergence, likeliest
from deepspeed_recipes.training.methods.distillation.likeliest import LOG_PROBS, PLACES, TARGETS, TOKENS, PlacesCollator
from deepspeed_recipes.training.model import output_head
from tests.parity import gate
from tests.ranks import read_logs, run_on
from tests.small import small

VOCABULARY = 50


def of(**settings):
    return replace(pages.find("tiny", "distill"), method=Distill(teacher="teacher", **settings))


@pytest.fixture
def distributions():
    """Return random log-probabilities of a student and of a teacher."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7, VOCABULARY, generator=generator).mul(2).log_softmax(-1) for _ in range(2)]


def test_divergences_are_those_of_torch_and_of_the_definition(distributions):
    student, teacher = distributions
    kl = partial(torch.nn.functional.kl_div, log_target=True, reduction="none")
    forward = divergence.per_token(student, teacher, of(loss="forward_kl"))
    reverse = divergence.per_token(student, teacher, of(loss="reverse_kl"))
    torch.testing.assert_close(forward, kl(student, teacher).sum(-1))
    torch.testing.assert_close(reverse, kl(teacher, student).sum(-1))
    mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
    expected = 0.3 * kl(mixture, teacher).sum(-1) + 0.7 * kl(mixture, student).sum(-1)
    torch.testing.assert_close(divergence.per_token(student, teacher, of(loss="jsd", beta=0.3)), expected)


def test_the_generalised_divergence_becomes_forward_and_reverse_kl(distributions):
    student, teacher = (one.double().log_softmax(-1) for one in distributions)
    near = 1e-6  # the paper's limits, after division by beta and by 1 - beta
    for loss, beta in (("forward_kl", near), ("reverse_kl", 1 - near)):
        limit = divergence.per_token(student, teacher, of(loss="jsd", beta=beta)) / near
        torch.testing.assert_close(limit, divergence.per_token(student, teacher, of(loss=loss)), rtol=1e-3, atol=0)


def test_the_likeliest_and_all_others_are_a_distribution_and_no_further_apart(distributions):
    student, teacher = distributions
    before = torch.zeros(len(student))
    for count in (1, 5, 20, VOCABULARY):
        tokens = teacher.topk(count).indices
        few = [divergence.of_outcomes(one, tokens) for one in (student, teacher)]
        torch.testing.assert_close(few[0].exp().sum(-1), torch.ones(len(student)))
        apart = divergence.per_token(*few, of())
        assert (apart >= before - 1e-6).all()
        before = apart
    torch.testing.assert_close(before, divergence.per_token(student, teacher, of()))


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if torch.is_tensor(leaf)]
        self.elements = max([self.elements, *sizes])
        return found


@pytest.mark.parametrize("bias", [False, True])
def test_tiles_give_the_loss_and_the_gradients_of_whole_logits_without_them(monkeypatch, bias):
    torch.manual_seed(0)
    linear, hidden = torch.nn.Linear(8, VOCABULARY + 3, bias=bias), torch.randn(40, 8, requires_grad=True)
    teacher = torch.randn(40, VOCABULARY).log_softmax(-1)
    head = output_head.Head(linear, scale=0.5, softcap=2.0, vocabulary=VOCABULARY)

    def compare(logits, tokens):
        apart = divergence.per_token(logits.log_softmax(-1), teacher[tokens], of())
        return apart.sum(), apart[None]

    logits = 2 * torch.tanh(0.5 * linear(hidden)[:, :VOCABULARY] / 2)
    whole = compare(logits, slice(None))[0]
    whole.div(3).backward()
    expected = [hidden.grad, *(one.grad for one in linear.parameters())]
    hidden.grad = None
    linear.zero_grad()
    monkeypatch.setattr(divergence, "ENTRIES", 6 * VOCABULARY)
    with Largest() as largest:
        loss, numbers = divergence.summed(hidden, head, compare)
        loss.div(3).backward()
    assert largest.elements <= max(6 * (VOCABULARY + 3), linear.weight.numel()) < 40 * VOCABULARY
    torch.testing.assert_close(loss, whole)
    assert numbers.shape == (1, 40) and not numbers.requires_grad
    for found, right in zip([hidden.grad, *(one.grad for one in linear.parameters())], expected, strict=True):
        torch.testing.assert_close(found, right)


def test_tiles_of_nothing_have_gradients_of_zero_and_a_frozen_head_has_none():
    linear, hidden = torch.nn.Linear(8, VOCABULARY, bias=False), torch.randn(0, 8, requires_grad=True)
    head = output_head.Head(linear.requires_grad_(False), 1.0, None, VOCABULARY)
    loss, numbers = divergence.summed(hidden, head, lambda logits, _: (logits.sum(), logits.T[:1]))
    loss.backward()
    assert loss == 0 and numbers.numel() == 0 and hidden.grad.shape == (0, 8) and linear.weight.grad is None


def test_factors_and_caps_of_logits_are_read_from_the_configuration():
    def head(**config):
        text = SimpleNamespace(**{"model_type": "any", **config})
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), get_output_embeddings=object)
        found = output_head.head_of(model, VOCABULARY)
        return found.scale, found.softcap

    assert head() == (1.0, None)
    assert head(logit_scale=0.25) == (0.25, None)
    assert head(logits_scaling=8.0) == (0.125, None)
    assert head(logits_scaling=8.0, model_type="hyperclovax") == (8.0, None)
    assert head(final_logit_softcapping=30.0) == (1.0, 30.0)


def test_places_are_where_a_labelled_token_is_next():
    sequences = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "seq_lengths": [3]},
        {"input_ids": [8, 9], "labels": [-100, 9], "seq_lengths": [2]},
    ]
    likely = [{TOKENS: [1, 2, 3, 4], LOG_PROBS: [0.0] * 6}, {TOKENS: [5, 6], LOG_PROBS: [1.0] * 3}]
    batch = PlacesCollator(Collator(0, multiple=4), top_k=2)(
        [{**one, **{name: torch.tensor(value).numpy() for name, value in more.items()}}
         for one, more in zip(sequences, likely, strict=True)]
    )  # fmt: skip
    assert batch[PLACES].tolist() == [0, 1, 4] and batch[TARGETS].tolist() == [6, 7, 9]
    assert batch[TOKENS].tolist() == [[1, 2], [3, 4], [5, 6]] and batch[LOG_PROBS].shape == (3, 3)
    assert batch["input_ids"].flatten()[batch[PLACES] + 1].tolist() == [6, 7, 9]


@pytest.mark.every
def test_it_resumes_exactly_from_what_is_kept_of_the_teacher(
    ranks, tmp_path, model_folder, teacher_folder, conversations
):
    kept = tmp_path / "kept"
    settings = Distill(teacher=str(teacher_folder), top_k=16, cache=str(kept), temperature=2.0, alpha=0.2)
    recipe = small(
        model_folder, conversations, "zero2.json", method=settings, lora=Lora(rank=4), save_steps=3,
        packing=True, global_batch_size=2, micro_batch_size=1, learning_rate=3e-3, schedule=Schedule("cosine", 0.1),
    )  # fmt: skip
    run = run_on(ranks, recipe, tmp_path)
    records, parts = read_jsonl(run.metrics), sorted(kept.glob("*.arrow"))
    assert len(parts) == 2 and read_json(kept / likeliest.MARK)["top_k"] == 16
    written = [part.stat().st_mtime_ns for part in parts]
    shutil.move(teacher_folder / "model.safetensors", tmp_path / "away.safetensors")
    try:
        mark = read_json(kept / likeliest.MARK)
        write_json(kept / likeliest.MARK, mark | {"teacher": f"{teacher_folder}@None"})  # of a folder without weights
        gate.resume(ranks, run, tmp_path)
    finally:
        shutil.move(tmp_path / "away.safetensors", teacher_folder / "model.safetensors")
    assert [part.stat().st_mtime_ns for part in parts] == written
    numbers = {"loss", "grad_norm", "divergence", "cross_entropy"}
    for row, before in zip(read_jsonl(run.metrics), records, strict=True):
        for name in numbers:
            assert row[name] == pytest.approx(before[name], rel=1e-6, abs=1e-9), (row["step"], name)
    drawn = {block.title for block in curves.section(read(run.path)).blocks if isinstance(block, Chart)}
    assert drawn >= {"divergence", "cross_entropy"}


def test_a_damaged_teacher_is_named(ranks, tmp_path, model_folder, teacher_folder, conversations):
    damaged = shutil.copytree(teacher_folder, tmp_path / "teacher")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3] = float("nan")
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(model_folder, conversations, "zero3.json", method=Distill(teacher=str(damaged), top_k=4)))
    assert ranks.run(training_run.main, str(run.path), log=tmp_path / "log") == [2, 2]
    said = f"distill.teacher={damaged}: model.layers.1.mlp.up_proj.weight has values that are not finite"
    assert said in read_logs(tmp_path / "log")[0]


@pytest.mark.every
def test_it_resumes_exactly_with_its_own_answers(ranks, tmp_path, model_folder, teacher_folder, conversations):
    settings = Distill(teacher=str(teacher_folder), loss="reverse_kl", on_policy=0.6, max_new_tokens=12)
    recipe = small(
        model_folder, conversations, "zero3.json", method=settings, save_steps=3,
        max_steps=6, global_batch_size=4, micro_batch_size=1, learning_rate=3e-3,
    )  # fmt: skip
    assert {distill.writes(recipe, step) for step in (3, 4, 5)} == {True, False}
    run = run_on(ranks, recipe, tmp_path)
    records = read_jsonl(run.metrics)
    gate.resume(ranks, run, tmp_path)
    for row, before in zip(read_jsonl(run.metrics), records, strict=True):
        for name in ("loss", "grad_norm", "divergence"):
            assert row[name] == pytest.approx(before[name], rel=1e-6, abs=1e-9), (row["step"], name)
    tokens = [after["tokens"] - before["tokens"] for before, after in pairwise(records)]
    assert len(set(tokens)) > 2, "those of the answers that were written"


def writing(share, max_new_tokens):
    settings = Distill(teacher="teacher", on_policy=share, max_new_tokens=max_new_tokens)
    return replace(pages.find("tiny", "distill"), packing=False, method=settings)


def test_prompts_that_leave_no_room_for_an_answer_are_left_out(alone, monkeypatch, capsys):
    recipe = replace(writing(0.5, 10), sequence_length=16, global_batch_size=2, micro_batch_size=2)
    labels = [[-100] * prompt + [7] for prompt in (5, 6, 7)]
    found = Datasets(Dataset.from_dict({"labels": labels}), None, None, [], updates.Size(3, 3, 3, 21))
    monkeypatch.setattr(distill, "tokenized_datasets", lambda *_: found)
    monkeypatch.setattr(distill.teacher, "check", lambda *_: None)
    kept = distill.datasets(recipe, None)
    assert [len(one) for one in kept.training["labels"]] == [6, 7] and kept.size.sequences == 2
    assert "1 examples left out" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"distill\.max_new_tokens=10: 2 of 3 prompts leave room in sequence_length=16"):
        distill.datasets(replace(recipe, global_batch_size=4), None)


def test_a_share_of_the_steps_is_on_policy():
    for share in (0, 0.25, 1):
        steps = [distill.writes(writing(share, 10), step) for step in range(1000)]
        assert sum(steps) / 1000 == pytest.approx(share, abs=0.05)


def test_what_is_kept_of_something_else_is_refused(tmp_path):
    mark = dict.fromkeys(likeliest.MEANT, "as it was")
    assert not likeliest.known(tmp_path, mark)
    write_json(tmp_path / likeliest.MARK, mark)
    assert likeliest.known(tmp_path, mark)
    for name, meaning in likeliest.MEANT.items():
        with pytest.raises(UserError, match=f"distill.cache={tmp_path}: was computed from {meaning}; name another"):
            likeliest.known(tmp_path, mark | {name: "changed"})


@pytest.mark.parametrize(
    "changed", ["model.safetensors", "config.json", "modeling.py", "generation_config.json", "a.md"]
)
def test_what_is_kept_is_of_the_teachers_weights_configuration_and_code(tmp_path, monkeypatch, model_folder, changed):
    monkeypatch.setattr(likeliest.dist, "broadcast_object_list", lambda found: None)
    folder = shutil.copytree(model_folder, tmp_path / "teacher")
    recipe = small(model_folder, tmp_path, method=Distill(teacher=str(folder), top_k=4))
    given = recipe, Dataset.from_dict({"input_ids": [[1]]}), AutoTokenizer.from_pretrained(model_folder)
    before = likeliest.of_run(*given)
    with (folder / changed).open("a") as file:
        file.write(" ")
    matters = changed in ("model.safetensors", "config.json", "modeling.py")
    assert (likeliest.of_run(*given) != before) is matters and likeliest.of_run(*given)["data"] == before["data"]


REFUSED = {
    "distill.loss=jsd distill.beta=1": r"distill.beta=1.0: must be above 0 and below 1; use distill.loss=forward_kl",
    "distill.loss=jsd distill.beta=0": "distill.beta=0.0: must be above 0",
    "distill.loss=kl": "must be one of forward_kl, reverse_kl, jsd",
    "distill.alpha=1": "distill.alpha=1: must be at least 0 and below 1",
    "distill.temperature=0": "distill.temperature=0: must be above 0",
    "distill.top_k=0": "distill.top_k=0: must be at least 1",
    "distill.cache=kept": "distill.cache=kept: .*; add distill.top_k=64",
    "distill.top_k=8 data.streaming=true max_steps=5 data.max_examples=none": "a stream cannot be read before training",
    "distill.teacher=http://host:8000": r"a server returns only the likeliest tokens; add distill.top_k=20",
    "distill.teacher=http://host:8000 distill.top_k=20 distill.temperature=2": "distill.temperature=2.0: a teacher on",
    "distill.teacher=https://host distill.top_k=20 distill.teacher_quantization=nf4": "quantization=nf4: a teacher on",
    "distill.on_policy=1.5": "distill.on_policy=1.5: must be at least 0 and at most 1",
    "distill.on_policy=0.5": "with packing=true, which packs the data.*: use packing=false",
    "distill.on_policy=0.5 packing=false distill.top_k=8": "with distill.top_k, which computes the data's answers",
    "distill.on_policy=0.5 packing=false distill.alpha=0.1": "with distill.alpha, which imitates the data's answers",
    "distill.on_policy=0.5 packing=false data.streaming=true max_steps=5 data.max_examples=none": (
        "with data.streaming=true, which cannot"
    ),
    "distill.on_policy=0.5 packing=false": "max_new_tokens=256: leaves no room .* use distill.max_new_tokens=128",
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_settings_are_refused(words):
    with pytest.raises(UserError, match=REFUSED[words]) as error:
        overrides.apply(pages.find("tiny", "distill"), words.split())
    assert len(str(error.value).splitlines()) <= 2


def test_nobody_to_learn_from_is_refused():
    recipe = overrides.apply(pages.find("tiny", "distill"), ["distill.teacher=none"])
    with pytest.raises(UserError, match=r"distill\.teacher is not set: .*; give a model folder"):
        limits.check(recipe, 2, DeepSpeedFile(stage=2))


def test_more_likeliest_tokens_than_there_are_tokens_are_refused():
    recipe = overrides.apply(pages.find("tiny", "distill"), ["distill.top_k=1153"])
    with pytest.raises(UserError, match=r"distill\.top_k=1153: the vocabulary has 1,152 tokens; use fewer"):
        limits.check(recipe, 2, DeepSpeedFile(stage=2))


def test_the_planner_counts_the_teacher():
    def planned(stage, recipe):
        setup = training_setup(recipe, DeepSpeedFile(stage=stage), 2)
        memory = peak_memory(profile_of(recipe.model.config), setup, Cluster(find("H100"), 2))
        return memory.components.get("teacher", 0), setup.teacher_parameters

    recipe = pages.find("tiny", "distill")
    assert planned(2, recipe) == (4 * 3_049_984, 3_049_984)
    assert planned(3, recipe) == (2 * 3_049_984, 3_049_984)
    in_4_bits = replace(recipe, method=replace(recipe.method, teacher_quantization="nf4"))
    assert planned(3, in_4_bits)[0] == pytest.approx(0.516 * 3_049_984, rel=1e-3)
    assert planned(2, replace(recipe, method=replace(recipe.method, top_k=8))) == (0, 0)
    assert planned(2, replace(recipe, method=Distill(teacher="meta-llama/Llama-3.1-8B-Instruct")))[1] == 8_030_261_248
    assert planned(2, pages.find("tiny", "full")) == (0, 0)


@pytest.fixture
def renumbered(tmp_path):
    """Copy the tiny model's configuration and tokenizer with two tokens exchanged."""
    folder = tmp_path / "renumbered"
    shutil.copytree(TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[500:502]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def test_a_teacher_with_another_vocabulary_is_refused_before_anything_starts(renumbered, tmp_path):
    recipe = paths.locate(overrides.apply(pages.find("tiny", "distill"), [f"distill.teacher={renumbered}"]))
    with pytest.raises(UserError, match=r"another vocabulary: 2 tokens differ \(.* is 50\d in the model") as error:
        preflight.check_layout(recipe, DeepSpeedFile(stage=2), 2, 2)
    assert len(str(error.value).splitlines()) == 2
    preflight.check_layout(paths.locate(pages.find("tiny", "distill")), DeepSpeedFile(stage=2), 2, 2)
    with pytest.raises(UserError, match=r"distill\.teacher=.*: this folder has no config.json"):
        paths.locate(overrides.apply(pages.find("tiny", "distill"), [f"distill.teacher={tmp_path}"]))
    shutil.copytree(SAMPLES / "tiny_model", tmp_path / "run" / "export")
    with pytest.raises(UserError, match=r"has no config.json; its model is in .*run/export\."):
        paths.locate(overrides.apply(pages.find("tiny", "distill"), [f"distill.teacher={tmp_path / 'run'}"]))
    write_json(tmp_path / "run" / "adapter_config.json", {"base_model_name_or_path": "base"})
    adapter = paths.locate(overrides.apply(pages.find("tiny", "distill"), [f"distill.teacher={tmp_path / 'run'}"]))
    with pytest.raises(UserError, match=r"distill.teacher=.*/run: an adapter, not a whole model; merge it first"):
        preflight.check_model(adapter)
    with pytest.raises(UserError, match=r"distill.teacher=no/such/folder: no such file or folder"):
        paths.locate(overrides.apply(pages.find("tiny", "distill"), ["distill.teacher=no/such/folder"]))


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_teacher_with_fewer_positions_than_a_sequence_is_refused(tmp_path, name):
    """Rotary positions would be beyond those that it has learned, and learned ones have no rows: an IndexError."""
    from transformers import AutoTokenizer

    from deepspeed_recipes.training.methods.distillation import teacher

    shutil.copytree(TINY_TEACHER, tmp_path / "short")
    config = read_json(tmp_path / "short" / "config.json")
    for most, fits in ((255, False), (256, True)):
        write_json(tmp_path / "short" / "config.json", {**config, "max_position_embeddings": None, name: most})
        short = paths.locate(overrides.apply(pages.find("tiny", "distill"), [f"distill.teacher={tmp_path / 'short'}"]))
        check = [
            lambda recipe=short: preflight.check_layout(recipe, DeepSpeedFile(stage=2), 2, 2),
            lambda recipe=short: teacher.check(recipe, AutoTokenizer.from_pretrained(TINY_MODEL)),
        ]
        for one in check if name == "max_position_embeddings" else check[:1]:
            refused = pytest.raises(UserError, match=r"has 255 positions, .* 256; set sequence_length=255, or use")
            with nullcontext() if fits else refused:
                one()


def test_the_ranks_compare_tokenizers_before_they_load_weights(renumbered):
    from transformers import AutoTokenizer

    from deepspeed_recipes.training.methods.distillation import teacher

    recipe, tokenizer = pages.find("tiny", "distill"), AutoTokenizer.from_pretrained(TINY_MODEL)
    assert teacher.check(recipe, tokenizer) == 1152
    wrong = replace(recipe, method=Distill(teacher=str(renumbered)))
    with pytest.raises(UserError, match="another vocabulary: 2 tokens differ"):
        teacher.check(wrong, tokenizer)
    assert recipe.method.teacher == TINY_TEACHER


@pytest.mark.parametrize("change", ["same", "other", "none", "classifier"])
def test_a_teacher_of_another_chat_template_is_named_and_a_classifier_refused(tmp_path, monkeypatch, change):
    from deepspeed_recipes.training.methods.distillation import teacher

    shutil.copytree(TINY_TEACHER, tmp_path / "teacher")
    template, said = tmp_path / "teacher" / "chat_template.jinja", []
    if change == "other":
        template.write_text(template.read_text().replace("<|assistant|>", "<|user|>"))
    elif change == "none":
        template.unlink()
    elif change == "classifier":
        config = read_json(tmp_path / "teacher" / "config.json")
        write_json(tmp_path / "teacher" / "config.json", config | {"architectures": ["Qwen3ForSequenceClassification"]})
    monkeypatch.setattr(teacher, "say", said.append)
    recipe = replace(pages.find("tiny", "distill"), method=Distill(teacher=str(tmp_path / "teacher")))
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    if change == "classifier":
        with pytest.raises(UserError, match=r"to classify \(Qwen3ForSequenceClassification\), not to write"):
            teacher.check_model(recipe, tokenizer)
        return
    teacher.check_model(recipe, tokenizer)
    assert any("another chat template" in line for line in said) == (change != "same")


def test_both_distributions_are_softened_by_the_temperature_and_the_answers_are_not(distributions):
    """The loss of a tile is Hinton's: T^2 times the divergence at temperature T, and the cross-entropy at 1."""
    logits, other = (3 * one for one in distributions)
    recipe, targets = of(temperature=2.0, alpha=0.25), torch.arange(7)
    softened = (other / 2).log_softmax(-1)
    context, teacher = SimpleNamespace(recipe=recipe), SimpleNamespace(log_probs=lambda hidden: hidden)
    trainer = SimpleNamespace(context=context, distill=recipe.method, teacher=teacher)
    loss, numbers = RunDistillTrainer._compared(trainer, {TARGETS: targets}, softened, logits, slice(0, 7))
    kl = torch.nn.functional.kl_div((logits / 2).log_softmax(-1), softened, log_target=True, reduction="none").sum(-1)
    said = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss, (0.75 * 4 * kl + 0.25 * said).sum())
    torch.testing.assert_close(numbers, torch.stack([kl, said]))
