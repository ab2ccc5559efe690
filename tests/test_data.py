"""Data: what is in the loss, what is dropped, and that packed documents do not attend to each other."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from datasets.fingerprint import Hasher
from transformers import AutoTokenizer

from deepspeed_recipes.launching import paths
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.training.console import show
from deepspeed_recipes.training.data import load, tokenize
from deepspeed_recipes.training.data.collate import IGNORED, Collator
from deepspeed_recipes.training.data.report import pieces
from deepspeed_recipes.training.methods import preferences
from deepspeed_recipes.training.model.load import load_model
from tests.conftest import conversation
from tests.small import small


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def model(model_folder, conversations):
    """Load the model as a run does: with a key/value cache, transformers would not look for packed documents."""
    return load_model(small(model_folder, conversations)).eval()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_only_the_assistants_tokens_are_in_the_loss(tmp_path, model_folder, tokenizer):
    turns = [
        {"role": "user", "content": "What is 2 plus 2?"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "And 3 plus 3?"},
        {"role": "assistant", "content": "It is 6."},
    ]
    path = write(tmp_path / "chat.jsonl", [{"messages": turns}])
    rows, report = tokenize.prepare(path, small(model_folder, path), tokenizer)
    learned = [label for label in rows[0]["labels"] if label != IGNORED]
    end = tokenizer.eos_token
    assert tokenizer.decode(learned) == f"It is 4.{end}It is 6.{end}"
    assert rows[0]["labels"][0] == IGNORED
    assert (report.examples, report.tokens, report.loss_tokens) == (1, len(rows[0]["input_ids"]), len(learned))


def test_raw_text_is_entirely_in_the_loss_and_cut_if_too_long(tmp_path, model_folder, tokenizer):
    texts = ["Short.", "A longer text about 12 pears and 34 apples. " * 8]
    path = write(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    recipe = small(model_folder, path, method="pretrain", sequence_length=40)
    rows, report = tokenize.prepare(path, recipe, tokenizer)
    assert all(row["labels"] == [IGNORED, *row["input_ids"][1:]] for row in rows)
    assert all(len(row["input_ids"]) <= 40 for row in rows)
    joined = [token for row in rows for token in row["input_ids"]]
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert joined == expected
    assert report.extra_pieces == len(rows) - 2 > 0
    assert any("cut into" in line for line in report.lines("training", 40))


@pytest.mark.parametrize("said", ["pears " * 20, "<|end|> " * 20])
@pytest.mark.parametrize("method", ["pretrain", "sft"])
def test_long_texts_cause_no_warning_of_the_tokenizer(tmp_path, model_folder, method, said):
    tokenizer = AutoTokenizer.from_pretrained(model_folder, model_max_length=16)
    row = {"text": said} if method == "pretrain" else conversation(said, "Yes.")
    path = write(tmp_path / "long.jsonl", [row])
    _, report = tokenize.prepare(path, small(model_folder, path, method=method, sequence_length=400), tokenizer)
    assert not tokenizer.deprecation_warnings and report.longest > 16
    (line,) = report.lines("training", 400)
    assert ("100%" not in line) and (f" {report.loss_tokens / report.tokens:.0%} of them in the loss" in line)
    assert "over 99% of them" in replace(report, tokens=512, loss_tokens=511).lines("training", 400)[0]


def test_the_report_counts_lengths_and_shows_what_is_in_the_loss(
    tmp_path, model_folder, tokenizer, monkeypatch, capsys
):
    chats = [conversation("Hi?", "Yes. " * n + "No.") for n in (0, 0, 1, 20)]
    path = write(tmp_path / "chat.jsonl", chats)
    recipe = small(model_folder, path, packing=True)
    rows, report = tokenize.prepare(path, recipe, tokenizer)
    lengths = [length for row in rows for length in row["seq_lengths"]]
    assert sum(count for *_, count in report.lengths) == len(lengths) == 4
    assert all(sum(low <= n <= high for n in lengths) == count for low, high, count in report.lengths)
    assert report.lengths[0][0] == min(lengths) and report.lengths[-1][1] >= max(lengths)
    assert report.lengths[-1][0] <= max(lengths) and len(report.bars()) in (5, 6)  # no empty bar at the end
    assert len({high - low for low, high, _ in report.lengths}) == 1, "steps are equal, and without gaps:"
    assert all(before[1] + 1 == after[0] for before, after in pairwise(report.lengths))
    assert [line.partition("#")[0] for line in replace(report, lengths=((8, 9, 1), (10, 250, 2))).bars()] == [
        "    8-9   tokens  ",
        "   10-250 tokens  ",
    ]
    assert report.tokens == sum(lengths) and f"{100 * sum(lengths) / 128:.0f}% filled" in report.lines("a", 128)[0]
    capsys.readouterr()
    show(tokenize.first_documents(rows, tokenizer))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "example: <|bos|><|user|>Hi?<|end|><|assistant|>«" + "Yes. " * 20 + "No.<|end|>»" and "«" in second
    assert len(tokenize.first_documents(rows, tokenizer, most=4)) == 3, "two of the four are alike"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show([[("Hi", False), ("Yes", True)]])
    coloured = capsys.readouterr().out
    assert "\x1b[32mYes" in coloured and "«" not in coloured


def test_examples_without_a_token_in_the_loss_are_dropped_and_counted(tmp_path, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = (
        "{% for turn in messages %}{% if turn.content == 'Yes.' %}{% generation %}{{ turn.content + eos_token }}"
        "{% endgeneration %}{% else %}{{ turn.content }}{% endif %}{% endfor %}"
    )
    path = write(tmp_path / "chat.jsonl", [conversation("Hi", "Yes."), conversation("Hi", "No.")])
    rows, report = tokenize.prepare(path, small(model_folder, path), tokenizer)
    assert (len(rows), report.dropped, report.unlearnable) == (1, 0, 1)
    assert "1 of 2 examples (50%) are dropped, without a token in the loss" in "\n".join(report.lines("training", 128))
    path = write(tmp_path / "void.jsonl", [conversation("Hi", "No.")])
    with pytest.raises(
        UserError, match=r"data\.path: the only example is without a token in the loss; are the answers empty"
    ):
        tokenize.prepare(path, small(model_folder, path), tokenizer)
    path = write(tmp_path / "both.jsonl", [conversation("Hi", "No."), conversation("Hi", "Yes." * 100)])
    with pytest.raises(UserError, match=r"1 of 2 examples are longer than .*, and the others without a"):
        tokenize.prepare(path, small(model_folder, path), tokenizer)


def test_pairs_whose_answers_are_rendered_alike_are_dropped_or_refused(tmp_path, model_folder, capsys):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("+ eos_token", "| trim + eos_token")
    pair = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "Yes. "}
    path = write(tmp_path / "some.jsonl", [pair, pair | {"rejected": "No."}])
    recipe = small(model_folder, path, method="dpo", packing=False)
    assert len(preferences.datasets(recipe, tokenizer).training) == 1
    assert "warning: training: 1 of 2 pairs have two answers of the same tokens" in capsys.readouterr().out
    path = write(tmp_path / "all.jsonl", [pair] * 2)
    with pytest.raises(UserError, match="2 of 2 pairs have two answers of the same tokens"):
        preferences.datasets(small(model_folder, path, method="dpo", packing=False), tokenizer)


def test_the_placeholders_of_an_image_are_shown_as_their_number(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokens = tokenizer("<|user|>" * 300 + "Hi? " + "<|end|>" * 3, add_special_tokens=False)["input_ids"]
    assert pieces(tokens, [False] * len(tokens), tokenizer) == [("<|user|> x 300 Hi? " + "<|end|>" * 3, False)]


def test_examples_that_are_too_long_are_dropped_and_counted(tmp_path, model_folder, tokenizer):
    rows = [conversation("Hi", "Hello"), conversation("Hi", "Hello " * 100), conversation("Hi", "Bye")]
    path = write(tmp_path / "chat.jsonl", rows)
    kept, report = tokenize.prepare(path, small(model_folder, path, sequence_length=64), tokenizer)
    assert (len(kept), report.examples, report.dropped) == (2, 3, 1)
    (warning,) = report.lines("training", 64)[1:]
    assert warning.startswith("warning: training: 1 of 3 examples (33%) are dropped, longer than sequence_length=64; ")
    assert f"the longest has {report.longest} tokens. sequence_length=" in warning and report.longest > 64
    assert "MOST OF THE DATA IS NOT USED" in replace(report, dropped=2).lines("training", 64)[1]
    with pytest.raises(UserError, match=r"all 3 examples .* sequence_length=8; sequence_length=512 keeps all"):
        tokenize.prepare(path, small(model_folder, path, sequence_length=8), tokenizer)


def test_packing_keeps_every_document_and_fills_the_sequences(conversations, model_folder, tokenizer):
    recipe = small(model_folder, conversations)
    alone, before = tokenize.prepare(str(conversations), recipe, tokenizer)
    packed, after = tokenize.prepare(str(conversations), replace(recipe, packing=True), tokenizer)
    assert len(packed) < len(alone)
    assert (before.tokens, before.loss_tokens) == (after.tokens, after.loss_tokens)
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) <= 128 for row in packed)
    documents = {tuple(row["input_ids"]) for row in alone}
    found = set()
    for row in packed:
        start = 0
        for length in row["seq_lengths"]:
            found.add(tuple(row["input_ids"][start : start + length]))
            start += length
    assert found == documents


def packed_batch(conversations, model_folder, tokenizer):
    recipe = small(model_folder, conversations, packing=True)
    rows, _ = tokenize.prepare(str(conversations), recipe, tokenizer)
    assert max(len(row["seq_lengths"]) for row in rows) > 1
    batch = Collator(tokenizer.pad_token_id)(list(rows))
    return rows, batch


def differences(model, rows, batch):
    """Return, document by document, how far its logits in the packed batch are from those it has alone."""
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        for index, row in enumerate(rows):
            start = 0
            for length in row["seq_lengths"]:
                tokens = torch.tensor([row["input_ids"][start : start + length]])
                yield (together[index, start : start + length] - model(input_ids=tokens).logits[0]).abs().max().item()
                start += length


def test_no_document_attends_to_another(model, conversations, model_folder, tokenizer):
    rows, batch = packed_batch(conversations, model_folder, tokenizer)
    assert max(differences(model, rows, batch)) < 1e-3
    model.config.use_cache = True
    assert max(differences(model, rows, batch)) > 1, (
        "transformers packs with a cache too: load_model need not turn it off"
    )
    model.config.use_cache = False
    # The same rows with positions that run on: then they do see each other, and the test sees that.
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    assert max(differences(model, rows, batch)) > 1


def without_counts(batch):
    """Take out what the trainer takes out before the model sees the batch."""
    del batch["tokens"], batch["squared_lengths"]
    return batch


def test_the_loss_of_packed_sequences_is_that_of_their_documents(model, conversations, model_folder, tokenizer):
    _, batch = packed_batch(conversations, model_folder, tokenizer)
    alone, report = tokenize.prepare(str(conversations), small(model_folder, conversations), tokenizer)
    without_counts(batch)
    with torch.no_grad():
        packed = model(**batch, num_items_in_batch=torch.ones(())).loss
        summed = 0
        for row in alone:
            inputs = without_counts(Collator(tokenizer.pad_token_id)([row]))
            summed += model(**inputs, num_items_in_batch=torch.ones(())).loss
    assert packed.item() == pytest.approx(summed.item(), rel=1e-5)
    assert (batch["labels"][:, 1:] != IGNORED).sum() == report.loss_tokens


def test_padding_continues_the_positions_and_has_no_label(tokenizer):
    rows = [
        {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "seq_lengths": [2, 1]},
        {"input_ids": list(range(10, 21)), "labels": [IGNORED] * 11, "seq_lengths": [11]},
    ]
    batch = Collator(pad_token_id=1)(rows)
    assert batch["input_ids"].shape == (2, 16) and batch["tokens"] == 14
    assert batch["squared_lengths"] == 2**2 + 1 + 11**2
    assert batch["position_ids"][0].tolist() == [0, 1, *range(14)]
    assert batch["position_ids"][1].tolist() == list(range(16))
    assert batch["labels"][0].tolist() == [IGNORED, 6, 7] + [IGNORED] * 13
    assert batch["input_ids"][0, 3:].eq(1).all()


def test_a_tokenizer_without_a_marking_template_is_refused(tmp_path, model_folder, conversations):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    recipe = small(model_folder, conversations)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(UserError, match="generation"):
        tokenize.prepare(str(conversations), recipe, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        tokenize.prepare(str(conversations), recipe, tokenizer)


@pytest.mark.parametrize(("family", "variant"), [("tiny", "full"), ("tiny", "pretrain"), ("tiny_vision", "full")])
def test_tokens_are_found_again(family, variant):
    """What datasets cannot hash it tokenizes again in every rank and run, under a name drawn at random."""
    recipe = paths.locate(pages.find(family, variant))
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    function = tokenize._texts if variant == "pretrain" else tokenize.of_conversation
    states = [tokenize._state(function(recipe, tokenizer)) for _ in range(2)]
    assert Hasher.hash(states[0]) == Hasher.hash(states[1])


def test_tokens_are_found_again_only_where_they_would_be_the_same(tmp_path, model_folder, monkeypatch):
    turns = [("user", "Why?"), ("assistant", "<think>\nSo.\n</think>\n\nSo."), ("user", "And?"), ("assistant", "So.")]
    path = write(tmp_path / "chat.jsonl", [{"messages": [{"role": role, "content": said} for role, said in turns]}])
    recipe = small(model_folder, path)

    def key(recipe=recipe, **template):
        tokenizer = AutoTokenizer.from_pretrained(model_folder, **template)
        raw, _ = load.read_examples(recipe, tokenizer)
        return tokenize._tokens(raw, recipe, tokenizer)._fingerprint

    first = key()
    assert first == key() == key(replace(recipe, learning_rate=2 * recipe.learning_rate, seed=1))
    template = AutoTokenizer.from_pretrained(model_folder).chat_template
    others = [
        key(replace(recipe, loss_on="last")),
        key(replace(recipe, data=replace(recipe.data, thinking="strip"))),
        key(chat_template=template.replace("<|assistant|>", "<|assistant|> ")),
        key(pad_token="<|end|>"),
    ]
    monkeypatch.setattr(tokenize, "TOKENIZED_BY", "another version")
    assert len({first, *others, key()}) == 6
    write(tmp_path / "chat.jsonl", [{"messages": [{"role": role, "content": said} for role, said in turns[:2]]}])
    assert key() != first
