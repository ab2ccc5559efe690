"""Classifiers and embedding models: what they train on, what they score, and what their exports hold."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from deepspeed_recipes.commands import export as export_script
from deepspeed_recipes.export import push
from deepspeed_recipes.launching import preflight
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.planning.cost.training_setup import training_setup
from deepspeed_recipes.recipe import deepspeed_file, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Embed
from deepspeed_recipes.recipe.recipe import Data, Layout, Lora, Schedule
from deepspeed_recipes.recipe.run_folder import read_json, read_jsonl
from deepspeed_recipes.training.data import classes, load
from deepspeed_recipes.training.data.forms import formats
from deepspeed_recipes.training.methods import classify, embed
from deepspeed_recipes.training.model_folder import base_model, card, complete
from tests.parity import gate
from tests.ranks import run_on
from tests.small import small


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def text(label, words="a"):
    return {"text": words, "label": label}


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
READ = {
    "text": (text("good"), "a", "good"),
    "whole number": (text(3), "a", "3"),
    "yes or no": (text(True), "a", "true"),
    "prompt": ({"prompt": "a", "label": "x"}, [CHAT[0]], "x"),
    "answer": ({"prompt": "a", "completion": "b", "label": "x"}, CHAT, "x"),
    "messages": ({"messages": CHAT[:1], "label": " x "}, [CHAT[0]], "x"),
}


@pytest.mark.parametrize("form", READ)
def test_texts_and_conversations_have_classes(form):
    row, content, label = READ[form]
    (found,) = formats.converted([("here", row)], "classify")
    assert (found["messages"] or found["text"], found["label"]) == (content, label)


def test_queries_are_anchors():
    (found,) = formats.converted([("here", {"query": "a", "positive": "b"})], "embed")
    assert found == {"anchor": "a", "positive": "b", "negative": []}
    for negatives in ("c", ["c"], ["c", "d"]):
        (found,) = formats.converted([("here", PAIR | {"negative": negatives})], "embed")
        assert found["negative"] == list(negatives)


def test_texts_that_are_json_stay_texts(alone, tmp_path):
    said = ["12", "null", '{"a": 1}', "[1, 2]", '"quoted"']
    path = tmp_path / "train.jsonl"
    path.write_text(lines(*(text("x", words) for words in said)), encoding="utf-8")
    recipe = replace(small(tmp_path, path, method="classify"), data=Data(path=str(path)))
    training, _ = load.read_examples(recipe)
    assert [(example["text"], example["messages"]) for example in training] == [(words, None) for words in said]


PAIR = {"anchor": "a", "positive": "b"}
BAD = {
    "one class": ("classify", [text("x")] * 8, "data.path: all 8 examples have the label 'x'; add examples of another"),
    "no classes": ("classify", [text(n) for n in range(8)], "8 examples have 8 different labels, .*data.columns="),
    "no label": ("classify", [text("x"), {"text": "a"}], ":2: 'label' is missing; it must be the class"),
    "null": ("classify", [text("x"), text(None)], ":2: 'label' is empty; it must be the class"),
    "null at first": ("classify", [text(None), text("x")], ":1: the field 'label' is empty; fill it, or remove"),
    "a share": ("classify", [text("x"), text(0.5)], ":2: 'label' is 0.5; .*as text or a whole number"),
    "no text": ("classify", [text("x", " "), text("y")], ":1: the field 'text' is empty"),
    "chats": ("classify", [{"messages": CHAT}], "the method classify reads labelled_text"),
    "few pairs": ("embed", [PAIR] * 3, "data.path: 3 pairs, fewer than global_batch_size=8; .* to at most 3, or add"),
    "some negatives": ("embed", [PAIR, PAIR | {"negative": "c"}] * 4, "examples 4 with 0 negatives, 4 with 1 neg"),
    "few negatives": ("embed", [PAIR | {"negative": ["c"] * n} for n in (1, 2)] * 4, "4 with 1 negative, 4 with 2 neg"),
    "empty negatives": ("embed", [PAIR | {"negative": ["c", ""]}] * 8, ":1: the field 'negative' is empty"),
    "equal": ("embed", [PAIR | {"negative": "b"}] * 8, ":1: 'positive' and 'negative' are equal"),
    "no positive": ("embed", [PAIR, {"anchor": "a"}], ":2: the field 'positive' must be a string"),
    "pairs of answers": ("embed", [{"chosen": "a", "rejected": "b"}], "the method embed reads anchor_positive"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_data_without_classes_or_pairs_is_refused_before_anything_starts(mistake, tmp_path):
    method, rows, said = BAD[mistake]
    path = tmp_path / "bad.jsonl"
    path.write_text(lines(*rows), encoding="utf-8")
    with pytest.raises(UserError, match=said) as caught:
        preflight.check_data(small(tmp_path, path, method=method))
    assert len(str(caught.value).splitlines()) <= 2 and len(str(caught.value)) < 500


def test_held_out_classes_are_those_of_training(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(text("x"), text("y"), text("x")))
    (tmp_path / "held_out.jsonl").write_text(lines(text("x"), text("z")))
    data = Data(path=str(tmp_path / "train.jsonl"), validation=str(tmp_path / "held_out.jsonl"))
    recipe = replace(small(tmp_path, tmp_path, method="classify"), data=data)
    with pytest.raises(UserError, match=r"data.validation: the label 'z' is not .* \('x', 'y'\); correct the label"):
        preflight.check_data(recipe)
    columns = {"data.path": data.path, "data.validation": "none"}
    assert preflight.check_data(overrides.apply(recipe, [f"{key}={value}" for key, value in columns.items()])) == 3


def test_settings_are_checked():
    for key, value, said in (
        ("classify.class_weights", "rare", "must be one of none, balanced"),
        ("embed.temperature", "0", "must be above 0"),
        ("embed.pooling", "first", "must be one of mean, last"),
    ):
        with pytest.raises(UserError, match=f"^{key}={value}.*{said}"):
            overrides.apply(pages.find("tiny", key.partition(".")[0]), [f"{key}={value}"])


def test_classes_are_in_the_order_of_numbers_or_names():
    assert classes.ordered(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert classes.ordered(["10", "9", "b", "a"]) == ["10", "9", "a", "b"]


def test_balanced_classes_weigh_the_same():
    labels = [0, 0, 0, 1, 2, 2]
    weights = classify.balanced(labels, 4)
    assert weights.tolist() == pytest.approx([6 / 9, 2, 1, 0])
    assert weights[torch.tensor(labels)].mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("labels", "answered", "macro_f1"),
    [("AAAABB", "AAABBB", (6 / 7 + 4 / 5) / 2), ("AAAAAAAAAB", "AAAAAAAAAA", 9 * 2 / 19 / 2)],
)
def test_macro_f1_is_the_mean_over_classes_that_occur(alone, monkeypatch, labels, answered, macro_f1):
    model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate("ABC")), num_labels=3))
    examples = [{"label": label} for label in labels]
    logits = torch.eye(3)[["ABC".index(label) for label in answered]]
    monkeypatch.setattr(classify, "judged", lambda *_: [(examples, logits)])
    context = SimpleNamespace(recipe=pages.find("tiny", "classify"))
    found = classify.metric(SimpleNamespace(context=context, model=model, processing_class=None), examples)
    assert found["macro_f1"] == pytest.approx(macro_f1)


def test_texts_that_are_right_too_are_no_negatives(alone):
    """Anchors 0 and 2 are equal, and so are the texts of 0 and 1."""
    right, equal = embed.candidates(torch.tensor([[1, 2, 1], [7, 7, 8], [9, 9, 7]]))
    assert right.tolist() == [0, 1, 2]
    assert equal.tolist() == [
        [False, True, True, False, False, True],
        [True, False, False, False, False, True],
        [True, False, False, False, False, False],
    ]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_padding_changes_no_vector(pooling, model_folder):
    model = AutoModel.from_pretrained(model_folder).eval()
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
    together = embed.embedded(model, embed.padded(texts, model.config.pad_token_id), pooling)
    for tokens, vector in zip(texts, together, strict=True):
        states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        one = states[-1] if pooling == "last" else states.mean(0)
        assert torch.allclose(vector, one / one.norm(), atol=1e-6)


def test_a_model_that_gives_all_texts_the_same_vector_finds_nothing(alone, model_folder, monkeypatch):
    examples = [{"anchor": f"a{n}", "positive": f"b{n}", "negative": []} for n in range(4)]
    recipe, tokenizer = small(model_folder, model_folder, method="embed"), AutoTokenizer.from_pretrained(model_folder)
    model = AutoModel.from_pretrained(model_folder).eval()
    with torch.no_grad():
        assert min(embed.found_at(model, tokenizer, examples, recipe, Layout())) >= 0
        model.norm.weight.zero_()
        assert embed.found_at(model, tokenizer, examples, recipe, Layout()) == [3] * 4
    same = [{"anchor": "a", "positive": f"b{n}", "negative": []} for n in range(4)]
    assert embed.found_at(model, tokenizer, same, recipe, Layout()) == [0] * 4  # all of them are right


@pytest.mark.parametrize("variant", ["classify", "embed"])
def test_the_plan_has_no_logits(variant):
    recipe = locate(pages.find("tiny", variant))
    setup = training_setup(recipe, deepspeed_file.read(recipe.deepspeed), 2)
    assert setup.scores and not setup.reference and not setup.packing
    assert setup.sequences_per_pass == recipe.micro_batch_size * {"classify": 1, "embed": 2}[variant]


def classified(folder, texts, **options):
    """Return what plain transformers gives each text."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval(), None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    return torch.stack(logits), [model.config.id2label[one.argmax().item()] for one in logits]


CASES = [(method, lora) for method in ("classify", "embed") for lora in (False, True)]


@pytest.mark.every
@pytest.mark.parametrize(("method", "lora"), CASES)
def test_it_learns_resumes_and_is_loaded_by_transformers(
    ranks, tmp_path, model_folder, labelled, matching, printed_by, refusal, method, lora
):
    data = labelled if method == "classify" else matching
    recipe = small(model_folder, data, f"zero{2 if lora else 3}.json", method=method, save_steps=3, micro_batch_size=2)
    recipe = replace(recipe, lora=Lora(rank=4) if lora else None, learning_rate=3e-3 if method == "classify" else 1e-3)
    recipe = replace(recipe, data=replace(recipe.data, validation=str(data)), schedule=Schedule("cosine", 0.1))
    run = run_on(ranks, recipe, tmp_path)
    summary, records = read_json(run.summary), read_jsonl(run.metrics)
    evaluations = read_jsonl(run.evaluations)
    assert all(0 <= row["accuracy"] <= 1 for row in records) and records[-1]["loss"] < records[0]["loss"]
    screen = (tmp_path / "log.0").read_text()
    assert "LOAD REPORT" not in screen and "talk to it" not in screen

    folder = run.export
    if lora:
        folder = tmp_path / "merged"
        assert export_script.main([str(run.path), "--output", str(folder), "--merge"]) == 0
    if method == "classify":
        check_classifier(run, folder, labelled, summary, evaluations)
    else:
        check_embeddings(folder, matching, summary, recipe)
    known = {"accuracy", "recall_at_1", "held-out examples"}
    assert any(word.replace("_", " ") in screen.splitlines()[-1] for word in known)
    assert ("a classifier" if method == "classify" else "an embedding model") in refusal("generate", folder, "Ada?")
    found = json.loads(printed_by("evaluate", run.path, "--json"))
    assert found["metric"] == summary["metric"] and found["models"][0]["score"] == pytest.approx(summary["after"])
    assert {file.name for file in push.files(folder)} >= {"README.md", "training/recipe.json"}

    gate.resume(ranks, run, tmp_path)
    for row, before in zip(read_jsonl(run.metrics), records, strict=True):
        for name in ("loss", "grad_norm", "accuracy"):
            assert row[name] == pytest.approx(before[name], rel=1e-6, abs=1e-9), (row["step"], name)


def check_classifier(run, folder, data, summary, evaluations):
    """Fail unless plain transformers gives each text the class that the run has counted."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    logits, answers = classified(folder, [row["text"] for row in rows])
    names = ["few", "many", "some"]
    assert summary["metric"] == "accuracy" and base_model.labels_of(run.export) == base_model.labels_of(folder) == names
    assert summary["after"] == sum(row["label"] == one for row, one in zip(rows, answers, strict=True)) / len(rows)
    labels = torch.tensor([names.index(row["label"]) for row in rows])
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert evaluations[-1]["loss"] == pytest.approx(expected, rel=1e-4)
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] and math.isfinite(evaluations[-1]["macro_f1"])
    assert "id2label[model(**inputs)" in (folder / card.FILE).read_text()


def check_embeddings(folder, data, summary, recipe):
    """Fail unless plain transformers loads the model, and sentence-transformers finds how to use it."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = list(dict.fromkeys(text for row in rows for text in (row["positive"], *row["negative"])))

    def vector(text):
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return states.mean(0) / states.mean(0).norm()

    with torch.no_grad():
        vectors = torch.stack([vector(text) for text in texts])
        found = [texts[(vectors @ vector(row["anchor"])).argmax()] == row["positive"] for row in rows]
    assert summary["metric"] == "recall_at_1" and summary["after"] == sum(found) / len(rows)
    assert all((folder / name).exists() for name in complete.FILES)
    kinds = [module["type"].rpartition(".")[2] for module in read_json(folder / "modules.json")]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    pooling = read_json(folder / complete.POOLING)
    assert pooling["word_embedding_dimension"] == model.config.hidden_size and pooling["pooling_mode_mean_tokens"]
    assert [name for name, on in pooling.items() if on is True] == ["pooling_mode_mean_tokens", "include_prompt"]
    assert read_json(folder / "sentence_bert_config.json")["max_seq_length"] == recipe.sequence_length
    assert "SentenceTransformer(" in (folder / card.FILE).read_text()


def test_pooling_of_the_last_token_is_written_too(tmp_path):
    complete.write_pooling(tmp_path, Embed(pooling="last"), 64, 128)
    pooling = read_json(tmp_path / complete.POOLING)
    assert pooling["pooling_mode_lasttoken"] and not pooling["pooling_mode_mean_tokens"]
