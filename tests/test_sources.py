"""Real files of every kind, the Hub as it fails, mixing by weight, and splitting without overlap."""

import json
import math
import re
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from datasets import Audio, ClassLabel, Dataset, DatasetDict, Video, load_dataset
from datasets.exceptions import DatasetNotFoundError

from deepspeed_recipes.launching import preflight
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Grpo
from deepspeed_recipes.training.data import load, sources, text_files
from deepspeed_recipes.training.data.forms import formats
from tests.conftest import conversation
from tests.small import small

CHATS = [conversation(f"Question {n}?", f"2024-01-{n:02}") for n in range(1, 6)]
TEXTS = [{"prompt": f"Question {n}?", "completion": f"2024-01-{n:02}"} for n in range(1, 6)]


def lines(found):
    return "".join(json.dumps(row) + "\n" for row in found)


def write_jsonl(folder):
    (folder / "a.jsonl").write_text(lines(CHATS))
    return folder / "a.jsonl"


def write_json_lines_named_json(folder):
    (folder / "a.json").write_text(lines(CHATS))
    return folder / "a.json"


def write_array(folder):
    (folder / "a.json").write_text(json.dumps(CHATS, indent=1))
    return folder / "a.json"


def write_parquet(folder):
    Dataset.from_list(CHATS).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def write_arrow_stream(folder):
    with pa.ipc.new_stream(folder / "a.arrow", pa.Table.from_pylist(CHATS).schema) as file:
        file.write_table(pa.Table.from_pylist(CHATS))
    return folder / "a.arrow"


def write_csv(folder):
    Dataset.from_list(TEXTS).to_csv(folder / "a.csv")
    return folder / "a.csv"


def write_folder(folder):
    (folder / "some").mkdir()
    (folder / "some" / "a.jsonl").write_text(lines(CHATS[:2]))
    Dataset.from_list(CHATS[2:]).to_parquet(folder / "some" / "b.parquet")
    (folder / "some" / "README.md").write_text("Not data.")
    return folder / "some"


def write_clone(folder):
    (folder / "clone" / "data").mkdir(parents=True)
    (folder / "clone" / "data" / "train-00000.jsonl").write_text(lines(CHATS))
    (folder / "clone" / "data" / "test-00000.jsonl").write_text(lines(CHATS[:1]))
    return folder / "clone"


def write_saved(folder):
    Dataset.from_list(CHATS).save_to_disk(folder / "saved")
    return folder / "saved"


def write_saved_splits(folder):
    DatasetDict(train=Dataset.from_list(CHATS), test=Dataset.from_list(CHATS[:1])).save_to_disk(folder / "saved")
    return folder / "saved"


WRITERS = {name.removeprefix("write_"): value for name, value in list(globals().items()) if name.startswith("write_")}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_every_kind_of_source_gives_the_same_examples(kind, streaming, tmp_path):
    path = WRITERS[kind](tmp_path)
    [source] = sources.read(str(path), small(tmp_path, path), streaming)
    assert [row["messages"] for row in source.examples] == [row["messages"] for row in CHATS]
    assert source.forms == ["prompt_completion" if kind == "csv" else "messages"]
    assert ("streamed" if streaming else "5 examples") in source.line() and source.forms[0] in source.line()


def test_tool_calls_keep_their_own_arguments(tmp_path):
    """Arrow's structs would give every call the arguments of all the others, as nulls."""
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": ["x", 2**70, 1e-12, math.pi]}}]
    turns = [{"role": "user", "content": "Go."}] + [{"role": "assistant", "tool_calls": [call]} for call in calls]
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"messages": turns}, *CHATS]))
    [source] = sources.read(str(path), small(tmp_path, path))
    found = [turn["tool_calls"][0]["function"] for turn in source.examples[0]["messages"][1:]]
    assert found == calls


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_what_tables_hold_and_json_does_not_is_read_as_in_json_lines(tmp_path, streaming):
    """Turns of WildChat-1M have a timestamp; a class's number alone would make good answers bad ones."""
    day, sound = datetime(2024, 5, 1, 12), {"path": "a.wav", "bytes": b""}
    call = {"function": {"name": "f", "arguments": {"day": day, "price": Decimal("1.50")}}}
    odd = {"timestamp": day, "took": timedelta(seconds=90), "raw": b"a"}
    turns = [turn | odd for turn in CHATS[0]["messages"]] + [{"role": "assistant", "tool_calls": [call]}]
    row = {"messages": turns, "tools": [{"name": "f", "default": day}], "sound": sound, "clip": sound}
    chats = Dataset.from_list([row]).cast_column("sound", Audio()).cast_column("clip", Video())
    answers = Dataset.from_list([{"prompt": "a", "completion": "b", "label": at} for at in (0, 1)])
    judged = answers.cast_column("label", ClassLabel(names=["good", "bad"]))
    chats.to_parquet(tmp_path / "chats.parquet")
    judged.save_to_disk(tmp_path / "judged")
    [source] = sources.read(str(tmp_path / "chats.parquet"), small(tmp_path, tmp_path), streaming)
    (found,) = source.examples
    of_json = {"timestamp": "2024-05-01 12:00:00", "took": "0:01:30"}
    assert found["messages"][:2] == [turn | of_json for turn in CHATS[0]["messages"]]
    arguments = found["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"day": "2024-05-01 12:00:00", "price": "1.50"}
    assert found["tools"][0]["function"]["default"] == "2024-05-01 12:00:00"
    assert source.unread == dict.fromkeys(["sound", "clip", "turns.timestamp", "turns.took", "turns.raw"], 1)
    for method, labels in (("kto", [True, False]), ("classify", ["good", "bad"])):
        [source] = sources.read(str(tmp_path / "judged"), small(tmp_path, tmp_path, method=method), streaming)
        assert [one["label"] for one in source.examples] == labels
    unknown = judged.map(lambda row, at: {"label": -at}, with_indices=True)
    unknown.save_to_disk(tmp_path / "unknown")
    with pytest.raises(UserError, match="row 2: 'label' is empty"):
        [*sources.read(str(tmp_path / "unknown"), small(tmp_path, tmp_path, method="classify"), streaming)[0].examples]


def test_datasets_turns_strings_into_dates(tmp_path):
    """`files.py` can give JSON back to datasets' own loader when this fails."""
    path = tmp_path / "a.jsonl"
    path.write_text(lines(TEXTS))
    assert load_dataset("json", data_files=str(path), split="train").features["completion"].dtype != "string"


def test_a_changed_file_is_read_again(tmp_path):
    path = write_jsonl(tmp_path)
    assert len(sources.read(str(path), small(tmp_path, path))[0].examples) == 5
    path.write_text(lines(CHATS[:3]))
    assert len(sources.read(str(path), small(tmp_path, path))[0].examples) == 3


def corrupt(folder):
    path = write_parquet(folder)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def wrong_type(folder):
    Dataset.from_list([{"prompt": "a", "completion": "b"}]).to_parquet(folder / "a.parquet")
    Dataset.from_list([{"prompt": "a", "completion": 5}]).to_parquet(folder / "b.parquet")
    return folder / "b.parquet"


def bad_example(folder):
    Dataset.from_list([*CHATS, {"messages": CHATS[0]["messages"][:1]}]).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def no_examples(folder):
    Dataset.from_list(CHATS).select([]).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def no_files(folder):
    (folder / "void").mkdir()
    return folder / "void"


def no_such_split(folder):
    path = write_clone(folder)
    (path / "data" / "train-00000.jsonl").unlink()
    return path


def other_names(folder):
    """Files as in HuggingFaceH4/ultrafeedback_binarized."""
    (folder / "hub" / "data").mkdir(parents=True)
    for split in ("train_sft", "test_sft", "train_prefs"):
        Dataset.from_list(CHATS).to_parquet(folder / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    return folder / "hub"


def no_saved_split(folder):
    DatasetDict(test=Dataset.from_list(CHATS)).save_to_disk(folder / "saved")
    return folder / "saved"


BAD = {
    corrupt: "a.parquet: cannot be read as parquet",
    wrong_type: "b.parquet: row 1: the field 'completion' must be a string or a list of turns; it is of type int",
    bad_example: "a.parquet: row 6: no assistant turn in 'messages'",
    no_examples: "a.parquet: contains no examples",
    no_files: "void: no file of the split 'train'",
    no_such_split: "its files are of the split test; data.split takes one",
    no_saved_split: "has the splits test; name one",
    other_names: "has the splits train_prefs, train_sft, test_sft; name one, as data.split=NAME.",
}


@pytest.mark.parametrize("write", BAD, ids=lambda write: write.__name__)
def test_what_cannot_be_read_is_named(write, tmp_path):
    path = write(tmp_path)
    with pytest.raises(UserError) as caught:
        sources.read(str(path), small(tmp_path, path))
    assert BAD[write] in str(caught.value) and len(str(caught.value).splitlines()) <= 3
    if "has the splits" in BAD[write]:
        with pytest.raises(UserError) as before:
            preflight.check_data(small(tmp_path, path))
        assert str(before.value) == str(caught.value), "before ranks start"


def test_the_hub_without_a_network_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="Without a network: copy the dataset here"):
        sources.read("someone/data", small(tmp_path, "someone/data"))


def test_links_that_are_not_read_are_named_and_a_folder_without_splits_is_all_of_train(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines([conversation("a?", "Yes.")]))
    (source,) = sources.read(str(folder), small(tmp_path, folder))
    assert sources.unread_files(source, small(tmp_path, folder).data) == []
    (folder / "b.jsonl").symlink_to(tmp_path / "absent.jsonl")
    (folder / "more").symlink_to(tmp_path)
    (warning,) = sources.unread_files(source, small(tmp_path, folder).data)
    assert warning == f"warning: {folder}: links to folders or to nothing are not read: b.jsonl, more."
    recipe = small(tmp_path, folder)
    with pytest.raises(UserError, match=r"its files are of the split train; data\.split takes one"):
        sources.read(str(folder), replace(recipe, data=replace(recipe.data, split="test")))


def test_splits_are_named_that_are_not_read_and_one_can_be_held_out(tmp_path, monkeypatch):
    folder, cache = tmp_path / "files", tmp_path / "cache"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.jsonl").write_text(lines([conversation(f"{split}?", "Yes.")]))
    data = small(tmp_path, folder).data
    (source,) = sources.read(str(folder), small(tmp_path, folder))
    (warning,) = sources.unread_files(source, data)
    assert "not read: test.jsonl, valid.jsonl. " in warning and f"data.validation={folder}/test.jsonl meas" in warning
    assert sources.unread_files(source, data, images=True) == []
    (folder / "test.md").write_text("Not data.")
    tiny = pages.find("tiny", "full")
    found = locate(replace(tiny, data=replace(tiny.data, validation=f"{folder}/valid,{folder}/test")))
    assert found.data.validation == f"{folder}/valid.jsonl,{folder}/test.jsonl"
    (folder / "test.md").unlink()
    held_out = replace(data, validation=f"{folder}/valid.jsonl,{folder}/test.jsonl")
    assert sources.unread_files(source, held_out) == []

    # A dataset as the Hub's library caches it, which reads it without a network.
    load_dataset("json", data_files={one.stem: str(one) for one in sorted(folder.iterdir())}, cache_dir=str(cache))
    (made,) = cache.glob("json/*/0.0.0/*/dataset_info.json")
    kept = cache / "someone___data/default/0.0.0" / ("a" * 40)
    kept.parent.mkdir(parents=True)
    made.parent.rename(kept)
    for file in kept.glob("json-*.arrow"):
        file.rename(kept / file.name.replace("json", "data"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    recipe = overrides.apply(pages.find("tiny", "full"), ["data.path=someone/data"])
    (source,) = sources.read("someone/data", recipe)
    said = "someone/data: not read: {} among its splits; data.validation=someone/data/{} measures"
    assert said.format("test, valid", "test") in sources.unread_files(source, recipe.data)[0]
    held_out = locate(replace(recipe, data=replace(recipe.data, validation="someone/data/test")))
    (measured,) = sources.read(held_out.data.validation, held_out)
    assert questions([*measured.examples]) == ["test?"] and sources.unread_files(measured, held_out.data) == []
    assert "not read: valid among" in sources.unread_files(source, held_out.data)[0]
    (tmp_path / "chats").mkdir()
    monkeypatch.chdir(tmp_path)
    for wrong in ("chats/x/tst", "someone/data", "./someone/data/test", "someone/data/test.jsonl"):
        with pytest.raises(UserError, match=r"data.validation=.*: no such file or folder"):
            locate(replace(recipe, data=replace(recipe.data, validation=wrong)))


def test_a_gated_data_set_asks_for_a_token(tmp_path, monkeypatch):
    def gated(*_, **__):
        raise DatasetNotFoundError("Dataset 'someone/data' is a gated dataset on the Hub.")

    monkeypatch.setattr(sources, "load_dataset", gated)
    with pytest.raises(UserError, match="HF_TOKEN"):
        sources.read("someone/data", small(tmp_path, "someone/data"))


def two(tmp_path, first, second):
    """Return two sources whose questions start with their names, and `first` and `second` rows."""
    for name, count in (("a", first), ("b", second)):
        (tmp_path / f"{name}.jsonl").write_text(lines([conversation(f"{name}{n}?", "Yes.") for n in range(count)]))
    path = f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}"
    return small(tmp_path, path), path


def questions(found):
    return [row["messages"][0]["content"] for row in found]


def test_without_weights_every_example_of_every_source_comes_once(tmp_path):
    recipe, path = two(tmp_path, 30, 10)
    mixed = questions(sources.mix(sources.read(path, recipe), None, 1))
    assert len(mixed) == 40 and len(set(mixed)) == 40


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_weights_are_the_shares_of_the_mixture(tmp_path, capsys, monkeypatch, streaming):
    recipe, path = two(tmp_path, 300, 300)
    found = sources.read(path, recipe, streaming)
    mixed = questions(sources.mix(found, [0.75, 0.25], 1))
    share = sum(question.startswith("a") for question in mixed) / len(mixed)
    assert share == pytest.approx(0.75, abs=0.04)
    assert len(set(mixed)) == 600, "every row is read at least once"
    assert mixed == questions(sources.mix(found, [0.75, 0.25], 1))
    assert mixed != questions(sources.mix(found, [0.75, 0.25], 2))
    if not streaming:
        monkeypatch.setattr("deepspeed_recipes.training.distributed.is_first", lambda: True)
        examples, _ = load.read_examples(replace(recipe, data=replace(recipe.data, weights="3,1")))
        often = rf"{0.75 * len(examples) / 300:.2g} times each\), 25%"
        assert re.search(rf"on average 75% of them from \S+a.jsonl \({often}", capsys.readouterr().out)


def test_a_share_is_held_out_and_nothing_is_on_both_sides(tmp_path):
    recipe, path = two(tmp_path, 200, 100)
    (tmp_path / "b.jsonl").write_text(lines([conversation(f"a{n}?", "Yes.") for n in range(100)]))
    found = sources.read(path, recipe)
    training, held_out = sources.split(found, 0.1, 1)
    left, right = (questions(sources.mix(side, None, 1)) for side in (training, held_out))
    assert len(left) + len(right) == 300 and len(right) == pytest.approx(30, abs=1)
    assert not set(left) & set(right), "b repeats rows of a; both of a pair stand on one side"
    assert questions(sources.mix(sources.split(found, 0.1, 1)[1], None, 1)) == right
    assert set(questions(sources.mix(sources.split(found, 0.1, 2)[1], None, 1))) != set(right)


def test_a_share_leaves_something_to_train_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([CHATS[0]] * 5))
    with pytest.raises(UserError, match="leaves no example of"):
        sources.split(sources.read(str(path), small(tmp_path, path)), 0.2, 1)


@pytest.mark.parametrize(("examples", "most"), [(19, 0), (20, 1), (60, 3), (10_400, 500)])
def test_own_data_holds_out_few_examples(tmp_path, examples, most):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([conversation(f"a{n}?", "Yes.") for n in range(examples)]))
    found = sources.read(str(path), small(tmp_path, path))
    sides = sources.split(found, "auto", 1)
    training, held_out = (questions(sources.mix(side, None, 1)) if side else [] for side in sides)
    assert (len(training), len(held_out)) == (examples - most, most) and not set(training) & set(held_out)


def test_examples_that_are_all_alike_are_all_trained_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([CHATS[0]] * 50))
    training, held_out = sources.split(sources.read(str(path), small(tmp_path, path)), "auto", 1)
    assert (sources.count(training), held_out) == (50, [])


def test_what_is_held_out_by_itself_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deepspeed_recipes.training.distributed.is_first", lambda: True)
    path = tmp_path / "a.jsonl"
    path.write_text(lines([conversation(f"a{n}?", "Yes.") for n in range(60)]))
    recipe = overrides.apply(pages.find("tiny", "full"), [f"data.path={path}"])
    examples, held_out = load.read_examples(recipe)
    assert (len(examples), len(held_out)) == (57, 3)
    assert "held out: 3 of 60 examples, the same ones whatever the seed; data.validation" in capsys.readouterr().out


def test_held_out_examples_are_the_same_for_every_seed_and_judged_ones_of_both_kinds(tmp_path):
    """A sweep over seeds compares scores on them; of ten examples that the usual draw takes, the first is good."""
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"a{n}?", "completion": "Yes.", "label": n % 8 == 0} for n in range(80)]
    path.write_text(lines(rows))
    found = []
    for words in (["seed=1"], ["seed=2"], ["seed=2", "data.validation_share=0.05"]):
        recipe = overrides.apply(pages.find("tiny", "kto_lora"), [f"data.path={path}", *words])
        found.append(load.read_examples(recipe)[1])
    first, second, share = ([row["prompt"] for row in one] for one in found)
    assert first == second and len(first) == len(share) == 4
    assert all(set(one["label"]) == {True, False} for one in found)


def test_the_form_can_be_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"messages": CHATS[0]["messages"], **TEXTS[1]}]))
    recipe = small(tmp_path, path)
    named = replace(recipe, data=replace(recipe.data, form="prompt_completion"))
    assert sources.read(str(path), recipe)[0].examples[0]["messages"] == CHATS[0]["messages"]
    assert sources.read(str(path), named)[0].examples[0]["messages"] == CHATS[1]["messages"]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_keys_that_nothing_reads_are_listed_once_with_their_number(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [turn | {"mood": "good"} for turn in row["messages"]]} for row in CHATS]
    path.write_text(lines([{"id": 1, "source": "x", **rows[0]}, *({"id": n, **row} for n, row in enumerate(rows[1:]))]))
    ids = 1 if streaming else 5
    for _ in range(2):  # the second time from the cache of datasets
        [source] = sources.read(str(path), small(tmp_path, path), streaming)
        assert source.unread == {"id": ids, "source": 1, "turns.mood": ids}
        assert "unread" not in (source.examples.column_names or ())
        line = source.unread_line("{{ message.mood }}")
        assert line.endswith(f"keys that nothing reads, with their numbers of examples: id ({ids}), source (1)")
        assert f"turns.mood ({ids})" in source.unread_line("{{ message.content }}")
    path.write_text(lines([{"messages": [turn | {"name": "Jo"} for turn in row["messages"]]} for row in CHATS]))
    [source] = sources.read(str(path), small(tmp_path, path), streaming)
    assert f"turns.name ({ids})" in source.unread_line("{{ tool_call.name }}"), "a function's, not the turn's"
    assert source.unread_line("{{ message['name'] }}") is None
    for start in ("{% for m in messages %}{{ m", "{{ messages[0]", "{% set it = messages[1] %}{{ it"):
        assert source.unread_line(f"{start}.name }}}}") is None
    counts = {"turns.tools": 1, "chat_template_kwargs.mood": 2}
    said = formats.unread_line("here", counts, "{{ tools }}{{ message.content }}{{ message.mood }}")
    assert said.endswith("chat_template_kwargs.mood (2), turns.tools (1)"), "the variables are not the turn's keys"
    assert formats.unread_line("here", counts, "{{ message.tools }}{{ mood }}") is None
    path.write_text(lines([{"prompt": f"{n}?", "answer": "a", "level": n, "unit": n % 2 or None} for n in range(4)]))
    (tmp_path / "own.py").write_text("def judge(answer, example):\n    return 1.0\n")
    recipe = small(tmp_path, path, method=Grpo(max_new_tokens=64), reward=f"{tmp_path}/own.py:judge")
    level = "answer (1), level (1)" if streaming else "answer (4), level (4), unit (2)"
    said = f"keys that only the reward function gets, with their numbers of examples: {level}"
    assert sources.read(str(path), recipe, streaming)[0].unread_line("{{ level }}").endswith(said)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv"])
def test_a_table_with_a_column_twice_is_refused_by_the_launcher_and_by_the_ranks(tmp_path, kind):
    path, table = tmp_path / f"a.{kind}", pa.table([["?"], ["a"], ["b"]], names=["prompt", "completion", "completion"])
    if kind == "arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        (pq.write_table if kind == "parquet" else pa.csv.write_csv)(table, path)
    recipe = small(tmp_path, path)
    for read in (lambda: preflight.check_file(path, "sft", recipe.data), lambda: sources.read(str(path), recipe)):
        with pytest.raises(UserError, match="'completion' twice") as caught:
            read()
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    folder = write_folder(tmp_path)
    data = small(tmp_path, folder).data
    (source,) = sources.read(str(folder), small(tmp_path, folder))
    assert sources.unread_files(source, data) == [], "a readme is not data"
    for name in ("notes.md", "scan.pdf", "more.txt", ".hidden"):
        (folder / name).write_text("Some text.")
    (warning,) = sources.unread_files(source, data)
    assert "3 of 6 files are not read: more.txt, notes.md, scan.pdf. Examples are read from .jsonl" in warning
    for number in range(9):
        (folder / f"{number}.docx").write_text("Text.")
    assert "0.docx, 1.docx, 2.docx, 3.docx, 4.docx and 7 more" in sources.unread_files(source, data)[0]
    splits = dict.fromkeys(("train", "dev", "test"), Dataset.from_list([{"prompt": "Hi?", "completion": "Yes."}]))
    DatasetDict(splits).save_to_disk(saved := tmp_path / "saved")
    (source,) = sources.read(str(saved), small(tmp_path, saved))
    said = f"not read: dev, test among its splits; data.validation={saved}/dev measures"
    assert said in sources.unread_files(source, replace(data, path=str(saved)))[0]
    measured = replace(data, path=str(saved), validation=f"{saved}/dev,{saved}/test")
    assert sources.unread_files(source, measured) == []
    assert said in sources.unread_files(source, data, images=True)[0]
    assert sources.count(sources.read(f"{saved}/dev", small(tmp_path, saved))) == 1
    for name in ("extra.jsonl", "train/more.csv", "README.md"):
        (saved / name).write_text("{}\n")
    said = f"{saved}: a data set of save_to_disk; other files in it are not read: extra.jsonl, train/more.csv"
    assert sources.unread_files(source, measured) == [f"warning: {said}"]
    (alone,) = sources.read(f"{saved}/train", small(tmp_path, saved / "train"))
    assert "read: more.csv" in sources.unread_files(alone, replace(data, path=f"{saved}/train"))[0]
    validation = f"{saved}/dev,{saved}/test,{saved}/extra.jsonl,{saved}/train/more.csv"
    assert sources.unread_files(source, replace(measured, validation=validation)) == []


def test_missing_parts_of_a_data_set_are_named(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    for number in (0, 2):
        Dataset.from_list(CHATS).to_parquet(folder / f"train-{number:05}-of-00003.parquet")
    (source,) = sources.read(str(folder), small(tmp_path, folder))
    (warning,) = sources.unread_files(source, small(tmp_path, folder).data)
    assert warning.endswith("1 of its numbered files are missing: train-00001-of-00003.parquet.")
    Dataset.from_list(CHATS).to_parquet(folder / "train-00001-of-00003.parquet")
    assert sources.unread_files(source, small(tmp_path, folder).data) == []


@pytest.mark.parametrize("others", [("val.jsonl",), ("val.jsonl", "dev-tools.jsonl")])
def test_a_file_without_a_split_next_to_one_that_is_named_for_a_split_is_named(tmp_path, others):
    for name in ("a.jsonl", *others):
        (tmp_path / name).write_text(lines([conversation("a?", "Yes.")]))
    with pytest.raises(UserError, match=rf"is named for the split validation, .* give data.path={tmp_path}/a.jsonl"):
        sources.read(str(tmp_path), small(tmp_path, tmp_path))


def test_rows_of_a_tsv_that_a_quote_joins_are_refused(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('prompt\tcompletion\n"Hi\tYes.\nBye"\tNo.\nWhy?\tSo.\n')
    with pytest.raises(UserError, match=r"a\.tsv:2: a quote joins 2 lines, each of which is a row"):
        list(text_files.read(file))
    file.write_text('prompt\tcompletion\n"Hi\nBye"\tNo.\n')
    assert [row for _, row in text_files.read(file)] == [{"prompt": "Hi\nBye", "completion": "No."}]


@pytest.mark.parametrize(
    "name, content", [("z.jsonl", ""), ("z.jsonl", "\n \n"), ("z.json", "[]"), ("z.csv", "text\n")]
)
def test_files_of_a_folder_without_an_example_are_named(tmp_path, name, content):
    folder = write_folder(tmp_path)
    data = small(tmp_path, folder).data
    (source,) = sources.read(str(folder), small(tmp_path, folder))
    assert sources.unread_files(source, data) == []
    (folder / name).write_text(content)
    (warning,) = sources.unread_files(source, data)
    assert f"1 of 3 files hold no example: {name}; are" in warning
    (one,) = sources.read(str(folder / "a.jsonl"), small(tmp_path, folder))
    assert sources.unread_files(one, data) == []


def test_copies_are_counted_and_held_out_ones_named(tmp_path):
    def read(name, rows):
        (tmp_path / name).write_text(lines(rows))
        return sources.read(str(tmp_path / name), small(tmp_path, tmp_path / name))

    once, thrice, other = read("a.jsonl", CHATS[:3]), read("b.jsonl", CHATS[:3] * 3), read("c.jsonl", CHATS[2:5])
    assert sources.repeated(once, [], 1) == sources.repeated(once, read("d.jsonl", CHATS[3:5]), 1) == []
    assert sources.repeated(thrice, [], 1) == ["training: 6 of 9 examples are copies of others (67%)"]
    assert sources.repeated([*once, *other], [], 1) == ["training: 1 of 6 examples is a copy of another (17%)"]
    (line,) = sources.repeated(once, other, 1)
    assert line.startswith("warning: held out: 1 of 3 examples are in the training data too")


def test_examples_with_the_bytes_of_images_can_be_split():
    rows = [{"images": [{"path": None, "bytes": bytes([number])}], "text": "Same."} for number in range(40)]
    source = sources.Source("images", "messages", Dataset.from_list(rows), {})
    training, held_out = sources.split([source], "auto", 1)
    assert (sources.count(training), sources.count(held_out)) == (38, 2)


def test_a_folder_of_texts_is_read_with_its_markdown(tmp_path):
    for name in ("a.md", "b.rst", "c.txt"):
        (tmp_path / name).write_text(f"Text of {name}.")
    (source,) = sources.read(str(tmp_path), small(tmp_path, tmp_path, method="pretrain"))
    assert sorted(source.examples["text"]) == ["Text of a.md.", "Text of b.rst.", "Text of c.txt."]
    assert sources.unread_files(source, small(tmp_path, tmp_path).data) == []
    (source,) = sources.read(str(tmp_path / "a.md"), small(tmp_path, tmp_path, method="pretrain"))
    assert source.examples["text"] == ["Text of a.md."]


def test_other_names_of_fields_are_read_from_every_source(tmp_path):
    path = tmp_path / "a.jsonl"
    judged = [{**CHATS[n], "kto_tag": n == 0, "functions": []} for n in range(2)]
    path.write_text(lines(judged))
    [source] = sources.read(str(path), small(tmp_path, path, method="kto", micro_batch_size=2))
    assert source.forms == ["judged_messages"] and source.examples["label"] == [True, False] and not source.unread


def test_too_few_examples_to_hold_some_out_are_said_with_what_holds_some_out(tmp_path, capsys, alone):
    path = tmp_path / "few.jsonl"
    path.write_text(lines(CHATS))
    recipe = small(tmp_path, path)
    recipe = replace(recipe, data=replace(recipe.data, validation_share="auto"))
    assert load.read_examples(recipe)[1] is None
    said = capsys.readouterr().out
    assert "held out: none, and 5% of 5 is less than one, so nothing will measure" in said
    assert "data.validation_share=0.2 holds out a fifth" in said
    mended = replace(recipe, data=replace(recipe.data, validation_share=0.2))
    assert len(load.read_examples(mended)[1]) == 1
