"""A checkpoint of other data, another recipe or another model is refused."""

import json

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import COMPLETE, write_json
from deepspeed_recipes.training.checkpoint import fingerprint
from deepspeed_recipes.training.data import sources, tokenize
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.small import small

MARK = {
    "recipe": "tiny-3m-full",
    "model": {"model_type": "qwen3", "hidden_size": 64},
    "tokenizer": "a",
    "data": "b",
    "order": {"seed": 1, "global_batch_size": 8},
}


@pytest.fixture
def checkpoint(tmp_path):
    write_json(tmp_path / COMPLETE, {"fingerprint": MARK})
    return tmp_path


def test_the_same_run_resumes(checkpoint):
    fingerprint.check(MARK, checkpoint, changed=False)
    fingerprint.check(MARK, None, changed=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "c"}, "trained with other data:"),
        ({"tokenizer": "c"}, "another tokenizer or chat template:"),
        ({"order": {"seed": 2, "global_batch_size": 8}}, r"\(seed=1 global_batch_size=8, now seed=2 global_batch"),
    ],
)
def test_other_data_is_refused_unless_it_is_accepted(checkpoint, change, said):
    with pytest.raises(UserError, match=said) as refused:
        fingerprint.check(MARK | change, checkpoint, changed=False)
    assert "data.changed=true accepts it" in str(refused.value) and "\n" not in str(refused.value)
    fingerprint.check(MARK | change, checkpoint, changed=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recipe": "tiny-3m-lora"}, r"another recipe \(tiny-3m-full, now tiny-3m-lora\)"),
        (
            {"model": {"model_type": "qwen3", "hidden_size": 128}},
            "hidden_size=64, now model_type=qwen3 hidden_size=128",
        ),
    ],
)
def test_another_models_checkpoint_is_never_accepted(checkpoint, change, said):
    for changed in (False, True):
        with pytest.raises(UserError, match=said):
            fingerprint.check(MARK | change, checkpoint, changed)


def test_the_digest_of_data_is_that_of_its_content_and_order(tmp_path, conversations):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    copy = tmp_path / "copy.jsonl"
    recipe = small(TINY_MODEL, copy)

    def digest(lines, streaming=False):
        copy.write_text("".join(f"{line}\n" for line in lines))
        examples = sources.mix(sources.read(str(copy), recipe, streaming), None, recipe.seed)
        if streaming:
            return fingerprint.of_data(tokenize.stream(examples, recipe, tokenizer))
        return fingerprint.of_data(tokenize.tokenized(examples, recipe, tokenizer)[0])

    lines = conversations.read_text().splitlines()
    others = (lines[::-1], [*lines[:-1], lines[-1].replace("please", "Please")], lines[:-1])
    assert digest(lines) == digest(lines)
    assert digest(lines) not in {digest(other) for other in others}
    assert digest(lines, streaming=True) == digest(lines, streaming=True) != digest(lines[::-1], streaming=True)


def test_pieces_of_arrow_do_not_show():
    """Rows that were selected, and the same rows written anew, are the same data."""
    rows = [{"input_ids": list(range(n)), "labels": [n] * n, "said": json.dumps([n])} for n in range(5, 25)]
    whole = Dataset.from_list(rows)
    assert fingerprint.of_data(whole.select([3, 1, 7])) == fingerprint.of_data(
        Dataset.from_list([rows[3], rows[1], rows[7]])
    )
    assert fingerprint.of_data(whole.select([3, 1, 7])) != fingerprint.of_data(whole.select([1, 3, 7]))


def test_a_tokenizer_is_known_by_what_it_does():
    first, same, other = (AutoTokenizer.from_pretrained(TINY_MODEL) for _ in range(3))
    other.chat_template = "{{ messages }}"
    assert fingerprint.of_tokenizer(first) == fingerprint.of_tokenizer(same) != fingerprint.of_tokenizer(other)
