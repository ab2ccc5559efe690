"""Sequence parallelism: which families compute the same over parts of sequences, and what a rank's part is."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from deepspeed_recipes.recipe import compatibility, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import rank_position
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.recipe.run_folder import RunFolder, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.data.collate import IGNORED
from deepspeed_recipes.training.model import draft, probe
from deepspeed_recipes.training.parallel import sequence
from tests.ranks import read_logs
from tests.small import language_families, small
from tests.tiers import tiered
from tests.workers import sequence_families

ROUNDING = 1e-5
"""Largest difference that rounding explains; 8e-7 was seen."""


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    ranks.check(sequence_families.main, str(folder / "found.json"), log=folder / "log")
    return json.loads((folder / "found.json").read_text())


def is_right(entry):
    assert isinstance(entry["off"], str) or not ROUNDING < entry["off"] < 0.1, "no doubt is left either way"
    return not isinstance(entry["off"], str) and entry["off"] < ROUNDING


@pytest.mark.every
def test_every_family_computes_the_same_over_parts_or_is_refused_before_the_run(found):
    sizes = [f"{family}-{size}" for family in language_families() for size in pages.page(family).SIZES]
    assert len(sizes) > 40 and set(sizes) < set(found)
    for name in sizes:
        assert is_right(found[name]) == (found[name]["model_type"] not in compatibility.FAMILIES["sequence"]), name
    refused = {found[name]["model_type"] for name in sizes if not is_right(found[name])}
    assert refused and refused <= set(compatibility.FAMILIES["sequence"])


@pytest.mark.every
def test_rotary_frequencies_are_those_of_the_whole_sequence(found):
    assert is_right(found["short and long"])
    assert not is_right(found["short on one rank, long on the other"])


@pytest.mark.every
def test_an_implementation_that_reads_position_ids_gets_those_of_the_whole_sequence(found):
    assert is_right(found["masked by position ids"])


def test_parts_make_up_the_sequence_and_no_label_is_lost():
    layout = Layout(tensor=2, sequence=4)
    tokens = torch.arange(2 * 64).view(2, 64)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": tokens, "tokens": 100}
    parts = [sequence.cut(batch, rank_position(layout, rank, 16), layout) for rank in range(8)]
    for rank, part in enumerate(parts):
        assert part["tokens"] == 100
        assert all(part[name].equal(parts[rank - rank % 2][name]) for name in ("input_ids", "shift_labels"))
        assert all(
            value.is_contiguous() and value.shape == (2, 16) for value in part.values() if torch.is_tensor(value)
        )
    whole = {name: torch.cat([part[name] for part in parts[::2]], dim=1) for name in parts[0] if name != "tokens"}
    assert all(whole[name].equal(tokens) for name in ("input_ids", "labels", "position_ids"))
    assert whole["shift_labels"][:, :-1].equal(tokens[:, 1:]) and (whole["shift_labels"][:, -1] == IGNORED).all()


def without_the_list(folder):
    """Run as if nobody had listed what goes wrong; executed on every rank."""
    compatibility.FAMILIES = {**compatibility.FAMILIES, "sequence": {}}
    training_run.main(folder)


@pytest.mark.parametrize(
    ("main", "why"),
    tiered(
        [
            (training_run.main, "sequence parallelism does not support bloom"),
            (without_the_list, "bloom with model.attention=eager trains differently"),
        ],
        lambda case: case[0] is training_run.main,
    ),
)
def test_a_run_that_would_train_a_different_model_is_refused(ranks, tmp_path, conversations, main, why):
    run = RunFolder(tmp_path / "run")
    draft.write(pages.page("bloom").full("560m"), tmp_path / "model", torch.float32)
    asked = small(tmp_path / "model", conversations, layout=Layout(sequence=2))
    write_recipe(run, replace(asked, model=replace(asked.model, attention="eager")))
    assert ranks.run(main, str(run.path), log=tmp_path / "log")[0] == 2
    said = read_logs(tmp_path / "log")[0]
    assert f"layout.sequence=2: {why}" in said
    assert "Traceback" not in said


def test_indivisible_heads_are_refused(model_folder, conversations):
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    with pytest.raises(UserError, match=r"layout\.sequence=3: each rank's 4 attention heads are not divisible by 3"):
        sequence.check(small(model_folder, conversations, layout=Layout(sequence=3)), tokenizer)


def test_the_draft_of_a_check_drops_nothing_and_is_otherwise_the_model():
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    config = AutoConfig.from_pretrained(draft.TINY_MODEL)
    config.attention_dropout = 0.5
    before = config.to_dict()
    certain = probe.draft_of(config, tokenizer, "sdpa", certain=True).config
    assert certain.attention_dropout == 0.0 and config.to_dict() == before
    assert certain.rms_norm_eps == config.rms_norm_eps > 0
