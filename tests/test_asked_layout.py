"""Layouts that somebody asks for: listed, costed, and their rank explained."""

import pytest

from deepspeed_recipes.commands import main

ON_64 = ("--gpu", "H100", "--gpus", "8", "--nodes", "8", "--sequence-length", "32768")
ON_512 = ("--gpu", "H100", "--gpus", "8", "--nodes", "64", "--sequence-length", "32768")
TP8_PP4_CP4 = ("layout.tensor=8", "layout.pipeline=4", "layout.sequence=4")
TP4_PP4_CP2 = ("layout.tensor=4", "layout.pipeline=4", "layout.sequence=2")
ON_16 = ("--gpu", "H100", "--gpus", "8", "--nodes", "2")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ["llama3-70b", *ON_512, *TP8_PP4_CP4],
            0,
            ["data 4 x tensor 8 x pipeline 4 x sequence 4", "tensor parallelism"],
        ),
        (["llama3-70b", *ON_64, *TP4_PP4_CP2], 1, ["data 2 x tensor 4 x pipeline 4 x sequence 2", "does not fit"]),
        (
            ["llama3-405b", *ON_512[:6], "layout.tensor=8", "layout.pipeline=8"],
            1,
            ["tensor 8 x pipeline 8 x sequence 8", "does not fit"],
        ),
        (["qwen3_moe-30b-a3b", *ON_16, "layout.expert=16"], 0, ["data 16 x expert 16", "for all-to-alls of expert"]),
    ],
    ids=["512", "64", "405b", "experts"],
)
def test_a_layout_that_is_asked_for_is_listed_and_its_rank_explained(words, status, said, capsys):
    assert main.run("plan", words) == status
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left to the planner" in shown and "tokens/s/GPU with" in shown
    assert all(each in shown for each in said), shown


def test_what_makes_a_plan_slower_adds_up(printed_by):
    """The components' differences explain the whole: no more than the part that is not named is missing."""
    shown = " ".join(printed_by("plan", "llama3-70b", *ON_512, *TP8_PP4_CP4).split())
    longer, _, parts = shown.partition("compared with the first: ")[2].partition("% more time per token, mainly ")
    assert int(longer) > 0 and sum(int(part.partition("%")[0]) for part in parts.split("+")[1:]) >= int(longer) / 2


def test_nothing_is_said_of_what_the_planner_would_choose_itself(printed_by):
    assert "Left to the planner" not in printed_by("plan", "llama3-8b", "lora", "--gpu", "H100", "deepspeed=zero0.json")


def test_a_micro_batch_that_does_not_fit_says_by_how_much_and_which_does(capsys):
    assert main.run("plan", ["llama3-8b", "lora", "--gpu", "4090", "micro_batch_size=16"]) == 1
    said = capsys.readouterr()
    assert "16 x 4" in said.out and "GiB of 23.6 on a GPU" in said.err and "micro_batch_size=4" in said.err
    assert main.run("plan", ["llama3-8b", "lora", "--gpu", "4090", "micro_batch_size=4"]) == 0
