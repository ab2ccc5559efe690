"""The sample data and the tiny base model: what their READMEs promise, checked on the committed files."""

import datetime
import itertools
import json
import math
import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe.project import SAMPLES
from scripts.maintain.samples import corpus, make_data, pretrain, world

MODEL = SAMPLES / "tiny_model"
CHATS = ["extract/train", "extract/held_out", "preferences/train", "preferences/held_out"]
TEXTS = ["text/train", "text/held_out"]
NORMAL_FORM = {
    "name": r"[A-Z][a-z]+ [A-Z][a-z]+",
    "date": r"20\d\d-\d\d-\d\d",
    "amount": r"[1-9]\d{0,3}\.\d\d",
    "city": r"[A-Z][a-z]+",
}


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def question_and_answer(row: dict) -> tuple[str, str]:
    messages = row["messages"] if "messages" in row else row["prompt"] + row["chosen"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    return messages[0]["content"], messages[1]["content"]


def names(file: str) -> set[str]:
    return {json.loads(question_and_answer(row)[1])["name"] for row in read(file)}


def forms_of_date(facts: dict) -> dict[str, str]:
    return world.date_forms(datetime.date.fromisoformat(facts["date"]))


def forms_of_amount(facts: dict, text: str) -> dict[str, str]:
    """Return the forms of the amount in the currency that the notice uses."""
    hundredths = int(facts["amount"].replace(".", ""))
    every = [world.amount_forms(hundredths, code) for code in world.CURRENCIES]
    lower = text.lower()  # a form at the beginning of a notice is capitalised
    return max(every, key=lambda forms: max((len(f) for f in forms.values() if f.lower() in lower), default=0))


def form_used(forms: dict[str, str], text: str) -> str | None:
    """Return the longest form in the text, for `EUR 45` is part of `EUR 45.00`; None if two read the same."""
    found = sorted((form for form in forms if forms[form] in text), key=lambda form: len(forms[form]))
    return found[-1] if found and list(forms.values()).count(forms[found[-1]]) == 1 else None


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def test_counts_are_the_documented_ones():
    counts = {
        "extract/train": 6000,
        "extract/held_out": 400,
        "preferences/train": 2000,
        "preferences/held_out": 200,
        "text/train": 6000,
        "text/held_out": 300,
        "judged/train": 2000,
        "judged/held_out": 200,
        "labelled/train": 2000,
        "labelled/held_out": 300,
        "matching/train": 1600,
        "matching/held_out": 200,
    }
    assert {name: len(read(name)) for name in counts} == counts == make_data.COUNTS
    assert sorted(SAMPLES.rglob("*.jsonl")) == sorted(SAMPLES / f"{name}.jsonl" for name in counts)


def test_no_text_and_no_answer_occurs_twice():
    pairs = [question_and_answer(row) for name in CHATS for row in read(name)]
    texts = [text for text, _ in pairs] + [row["text"] for name in TEXTS for row in read(name)]
    answers = [answer for _, answer in pairs]
    assert len(texts) == len(set(texts)) == 14_900
    assert len(answers) == len(set(answers)) == 8_600


def test_people_of_held_out_files_are_never_trained_on():
    extract, preferences = names("extract/held_out"), names("preferences/held_out")
    assert extract.isdisjoint(preferences)
    assert (names("extract/train") | names("preferences/train")).isdisjoint(extract | preferences)
    corpus = "\n".join(row["text"] for name in TEXTS for row in read(name))
    corpus += "\n".join(itertools.islice(pretrain.documents(9000, seed=2025), 6000, None))
    assert [name for name in extract if name in corpus] == []


@pytest.mark.parametrize("name", CHATS)
def test_every_answer_is_compact_json_in_normal_form(name):
    for row in read(name):
        _, answer = question_and_answer(row)
        facts = json.loads(answer)
        assert answer == make_data.compact(facts)
        assert list(facts) == [key for key in make_data.FIELDS if key in facts]
        assert "name" in facts and len(facts) >= 2
        for key, value in facts.items():
            assert re.fullmatch(NORMAL_FORM[key], value), (key, value)
        if "date" in facts:
            datetime.date.fromisoformat(facts["date"])


@pytest.mark.parametrize("name", CHATS)
def test_every_fact_can_be_read_from_its_notice(name):
    for text, answer in map(question_and_answer, read(name)):
        facts = json.loads(answer)
        given, family = facts["name"].split(" ")
        lower = text.lower()  # a form at the beginning of a notice is capitalised
        assert f"{given} {family}" in text or f"{family}, {given}" in text
        assert facts.get("city", "") in text
        assert "date" not in facts or any(form.lower() in lower for form in forms_of_date(facts).values())
        assert "amount" not in facts or any(form.lower() in lower for form in forms_of_amount(facts, text).values())


def test_a_written_form_means_one_date_and_one_amount():
    meaning: dict[str, str] = {}
    for day in (datetime.date(2020, 1, 1) + datetime.timedelta(days=n) for n in range(3653)):
        for form in world.date_forms(day).values():
            assert meaning.setdefault(form, day.isoformat()) == day.isoformat()
    hundredths = [*range(200, 12_000), *range(100_000, 1_000_000, 5000), 123_456, 999_999]
    for value, code in itertools.product(hundredths, world.CURRENCIES):
        normal = world.normal_amount(value, code)
        for form in world.amount_forms(value, code).values():
            assert meaning.setdefault(form, normal) == normal


def test_withheld_pairs_of_forms_occur_only_in_the_held_out_files():
    def withheld(file: str) -> list[tuple]:
        found = []
        for text, answer in map(question_and_answer, read(file)):
            facts = json.loads(answer)
            if {"date", "amount"} <= facts.keys():
                found.append((form_used(forms_of_date(facts), text), form_used(forms_of_amount(facts, text), text)))
        return [pair for pair in found if None not in pair and world.is_withheld(*pair)]

    assert len(withheld("extract/held_out")) >= 10
    assert withheld("extract/train") + withheld("preferences/train") == []


def test_half_of_the_judged_answers_are_right():
    rows = read("judged/train") + read("judged/held_out")
    assert 0.45 < sum(row["label"] for row in rows) / len(rows) < 0.55
    for row in rows:
        [message] = row["completion"]
        try:
            facts = json.loads(message["content"])
            right = message["content"] == make_data.compact(
                {key: facts[key] for key in make_data.FIELDS if key in facts}
            )
            right &= all(isinstance(fact, str) and re.fullmatch(NORMAL_FORM[key], fact) for key, fact in facts.items())
        except ValueError:
            right = False
        assert right or not row["label"]
    prompts = [row["prompt"][0]["content"] for row in rows]
    others = {question_and_answer(row)[0] for name in CHATS for row in read(name)}
    assert len(prompts) == len(set(prompts)) and others.isdisjoint(prompts)


def test_labels_are_what_a_notice_is_about():
    rows = {name: read(name) for name in ("labelled/train", "labelled/held_out")}
    assert {row["label"] for row in rows["labelled/train"]} == set(world.TOPICS)
    assert {row["label"] for row in rows["labelled/held_out"]} == set(world.TOPICS)
    starts = {"Receipt: ": "payment", "Reminder: ": "bill", "Meet ": "appointment", "Insured parcel": "delivery"}
    texts = [row for found in rows.values() for row in found]
    for start, topic in starts.items():
        found = {row["label"] for row in texts if row["text"].startswith(start)}
        assert found == {topic}


def test_queries_are_facts_of_the_notices_that_they_should_find():
    for row in read("matching/train") + read("matching/held_out"):
        facts = row["anchor"].split("; ")
        assert len(facts) >= 2 and row["positive"] not in row["anchor"]
        dates = [fact for fact in facts if re.fullmatch(NORMAL_FORM["date"], fact)]
        for date in dates:
            assert any(form.lower() in row["positive"].lower() for form in forms_of_date({"date": date}).values())


def test_texts_that_are_labelled_or_found_are_nowhere_else():
    found = [row["text"] for name in ("labelled/train", "labelled/held_out") for row in read(name)]
    found += [row[side] for name in ("matching/train", "matching/held_out") for row in read(name) for side in row]
    assert len(found) == len(set(found)) == 2300 + 2 * 1800
    assert {question_and_answer(row)[0] for name in CHATS for row in read(name)}.isdisjoint(found)


def test_rejected_answers_are_wrong_and_of_every_kind():
    kinds = set()
    for row in read("preferences/train") + read("preferences/held_out"):
        _, chosen = question_and_answer(row)
        [message] = row["rejected"]
        assert message["role"] == "assistant" and message["content"].strip() != chosen
        made_by = {mistake for mistake in make_data.MISTAKES if mistake(json.loads(chosen)) == message["content"]}
        assert made_by
        kinds |= made_by
    assert kinds == set(make_data.MISTAKES)


def test_raw_text_holds_no_chat_and_no_target_json():
    for row in (row for name in TEXTS for row in read(name)):
        assert "<|" not in row["text"]
        assert '{"name"' not in row["text"]


def test_regeneration_reproduces_the_committed_bytes(tmp_path):
    make_data.main(["--output", str(tmp_path)])
    written = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(written) == len(make_data.COUNTS)
    for path in written:
        assert path.read_bytes() == (SAMPLES / path.relative_to(tmp_path)).read_bytes(), path.name


@pytest.mark.every
def test_another_seed_gives_other_data(tmp_path):
    make_data.main(["--output", str(tmp_path), "--seed", "7"])
    assert (tmp_path / "extract/train.jsonl").read_bytes() != (SAMPLES / "extract/train.jsonl").read_bytes()


def test_model_is_small_and_loads_in_plain_transformers(model):
    assert (MODEL / "model.safetensors").stat().st_size <= 8_000_000
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert 2_500_000 <= model.num_parameters() <= 3_900_000
    config = model.config
    assert config.num_attention_heads % 4 == config.num_key_value_heads % 2 == config.num_hidden_layers % 2 == 0
    assert config.max_position_embeddings == 1024
    assert config.tie_word_embeddings


def test_end_of_turn_is_end_of_sequence_everywhere(tokenizer, model):
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id != end
    assert tokenizer.bos_token_id == model.config.bos_token_id not in (end, tokenizer.pad_token_id)
    assert tokenizer.model_max_length == 1024
    assert len(tokenizer) == model.config.vocab_size


def test_tokenizer_is_the_one_that_the_script_trains(tokenizer):
    again = pretrain.train_tokenizer(pretrain.committed_text())
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert tokenizer.tokenize("2025") == ["2", "0", "2", "5"]


@pytest.mark.every
def test_tokenizer_round_trip_on_all_sample_texts(tokenizer):
    texts = [row["text"] for name in TEXTS for row in read(name)]
    texts += [part for name in CHATS for row in read(name) for part in question_and_answer(row)]
    texts += ["Zoë pays 5 € at 北京, naïvely.\t\n  Two  spaces ."]
    assert tokenizer.batch_decode(tokenizer(texts, add_special_tokens=False)["input_ids"]) == texts


def test_mask_marks_exactly_what_the_assistant_says(tokenizer):
    turns = ["Twelve lamps.", '{"name":"A"}', "And now?", "No."]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    messages = [{"role": "system", "content": "Be brief."}, *messages]
    chat = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    marked = [token for token, mark in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == '{"name":"A"}<|end|>No.<|end|>'
    assert tokenizer.decode(chat["input_ids"]) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Twelve lamps.<|end|><|assistant|>"
        '{"name":"A"}<|end|><|user|>And now?<|end|><|assistant|>No.<|end|>'
    )


def test_masks_of_all_training_examples(tokenizer):
    chats = [row["messages"] for row in read("extract/train")]
    encoded = tokenizer.apply_chat_template(chats, return_assistant_tokens_mask=True, return_dict=True)
    lengths = set()
    for chat, tokens, mask in zip(chats, encoded["input_ids"], encoded["assistant_masks"], strict=True):
        marked = [token for token, mark in zip(tokens, mask, strict=True) if mark]
        assert tokenizer.decode(marked) == chat[1]["content"] + "<|end|>"
        assert len(tokens) <= 128
        lengths.add(len(marked))
    assert len(lengths) > 20  # uneven, so that weighting by tokens and by examples differ


def test_generation_prompt_is_the_beginning_of_the_whole_chat(tokenizer):
    messages = read("extract/held_out")[0]["messages"]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == prompt + messages[1]["content"] + "<|end|>"


def test_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="role must be system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "bot", "content": "?"}], tokenize=False)


@torch.no_grad()
def mean_loss(model, rows: list[list[int]]) -> float:
    tokens, labels = pretrain.padded(rows, model.config.pad_token_id)
    return model(input_ids=tokens, labels=labels).loss.item()


@pytest.mark.every
def test_base_model_has_learned_notices_of_people_it_has_never_met(tokenizer, model):
    """The second round of pre-training read only these; of the other documents it has forgotten some."""
    rng = random.Random("unseen")
    filed = [world.notice(rng, 1) for _ in range(64)]
    texts = [f"{text}\n{corpus.settings(facts)}" for text, facts in filed]
    perplexity = math.exp(mean_loss(model, tokenizer(texts)["input_ids"]))
    assert perplexity < 2.5, f"{perplexity:.2f}; uniform is {len(tokenizer)}"
    texts = [row["text"] for row in read("text/held_out")[:64]]
    assert math.exp(mean_loss(model, tokenizer(texts)["input_ids"])) < 15


def test_base_model_reads_notices_but_cannot_answer_a_chat(tokenizer, model):
    notice = 'Felix Vandland from Belburg owes 1,250 euros since 14 March 2025.\nname = "'
    known = tokenizer(notice, return_tensors="pt")
    said = tokenizer.decode(model.generate(**known, max_new_tokens=40)[0, known["input_ids"].shape[1] :])
    assert said.startswith("Felix Vandland") and "2025-03-14" in said
    for text, answer in map(question_and_answer, read("extract/held_out")[:8]):
        question = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        said = model.generate(**chat, max_new_tokens=64)[0, chat["input_ids"].shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=True).strip() != answer


@pytest.mark.every
def test_pretraining_lowers_the_loss_and_saves_what_it_trained(tmp_path, tokenizer):
    torch.manual_seed(0)
    model = pretrain.new_model(tokenizer)
    data = pretrain.batches(tokenizer, pretrain.documents(96, seed=0), tokens_per_batch=640, seed=0)
    before = mean_loss(model.eval(), data[0])
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    assert pretrain.pretrain(model, data, learning_rate=2e-3, newline=newline)[0] < before - 1
    pretrain.save(model, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.float32
    assert torch.equal(again.model.embed_tokens.weight.bfloat16(), model.model.embed_tokens.weight)
