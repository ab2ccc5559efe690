"""The model's own answers: how they are sampled and scored, what a failing reward function does, and resuming."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.recipe import own_code, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods.grpo import reward_functions
from deepspeed_recipes.recipe.overrides import apply
from deepspeed_recipes.recipe.recipe import Lora, Schedule
from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl, write_recipe
from deepspeed_recipes.report.run_data import read
from deepspeed_recipes.report.sections import examples
from deepspeed_recipes.samples import rewards as sample_rewards
from deepspeed_recipes.training.data.forms import formats
from deepspeed_recipes.training.methods import grpo
from deepspeed_recipes.training.methods.averages import Averages
from deepspeed_recipes.training.methods.rollouts import hooks, scoring
from tests.parity import gate
from tests.ranks import run_on
from tests.small import small
from tests.tiers import tiered
from tests.workers.grpo_alone import GRPO

FUNCTIONS = """
import os, re, sys, time

def good(answer, example): print("noise"); return len(answer)
def text(answer, example): return "1"
def batch(answer, example): return [1.0, 0.0]
def nothing(answer, example): pass
def nan(answer, example): return float("nan")
def crash(answer, example): return 1 / 0
def quits(answer, example): sys.exit(3)
def dies(answer, example): os._exit(1) if answer == "bad" else None; return 1
def segfaults(answer, example): os.kill(os.getpid(), 11) if answer == "bad" else None; return True
def hangs(answer, example):
    while answer == "bad":
        try: time.sleep(60)
        except BaseException: pass
    return 1
def matches(answer, example): return float(bool(re.match("(a+)+$", "a" * 40 + "b"))) if answer == "bad" else 1
def one(answer): return 1
def three(answer, example, more): return 1
def listed(prompts, completions, level, **others):
    assert others == {"expected": ["four"]}
    return [float(f"{prompt}{answer}" == right) for prompt, answer, right in zip(prompts, completions, level)]
def turns(completions, **others): return [len(one[0]["content"]) for one in completions if one[0]["role"][0] == "a"]
def two(completions): return [1, 2]
def named(answer, **example): return 1
async def later(answer, example): return 1
number = 3
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tiny():
    return pages.find("tiny", "grpo")


def scorer_of(tiny, reward, **changes):
    return scoring.Scorer(replace(tiny, reward=reward, method=replace(tiny.method, reward_seconds=0.3, **changes)))


@pytest.mark.parametrize(
    ("name", "bad", "fine"),
    [
        ("good", [3.0], [4.0]),
        ("text", "text returned a str; one number", None),
        ("batch", "batch returned a list of 2; one number", None),
        ("nothing", "nothing returned nothing", None),
        ("nan", "nan returned nan; a finite number", None),
        ("crash", "crash: ZeroDivisionError: division by zero (mine.py:9)", None),
        ("quits", "quits: SystemExit: 3", None),
        ("dies", "ended its process with status 1", [1.0]),
        ("segfaults", "ended its process with SIGSEGV", [1.0]),
        ("hangs", "took more than grpo.reward_seconds=0.3 for one answer", [1.0]),
        ("matches", "took more than grpo.reward_seconds=0.3 for one answer", [1.0]),
    ],
)
def test_a_failing_reward_function_ends_its_example(alone, functions, tiny, name, bad, fine):
    scorer = scorer_of(tiny, f"{functions}:{name}")
    try:
        said = scorer.ask("bad", {})
        assert said == bad if isinstance(bad, list) else said.startswith(bad)
        if fine:
            assert scorer.ask("fine", {}) == fine
        else:
            assert all(map(math.isnan, scorer.scores("fine", {})))
    finally:
        scorer.close()


def test_functions_that_are_written_for_trl_get_lists_of_texts_or_of_turns(alone, functions, tiny):
    own_code.check_files("reward", reward_functions(f"{functions}:listed,{functions}:turns,{functions}:two"))
    prompt = formats.converted([("file:1", {"prompt": "2 + 2?", "level": "2 + 2?4"})], "grpo")
    asked = scoring.example_of(next(iter(prompt))) | {"expected": "four"}
    for name, example, found in (
        ("listed", asked, [[1.0], [0.0]]),
        ("turns", {**asked, "prompt_text": None}, [[1.0], [3.0]]),
        ("two", asked, ["two: TypeError: returned a list of 2 for a list of one answer; a list of one number is"] * 2),
    ):
        scorer = scorer_of(tiny, f"{functions}:{name}")
        try:
            said = [scorer.ask(answer, example) for answer in ("4", "one")]
        finally:
            scorer.close()
        assert [one[:85] if isinstance(one, str) else one for one in said] == [
            one[:85] if isinstance(one, str) else one for one in found
        ]


def test_several_functions_are_weighted_and_one_that_fails_takes_the_others_with_it(alone, functions, tiny):
    scorer = scorer_of(tiny, f"{functions}:good,{functions}:dies", reward_weights="0.5,2")
    try:
        assert scorer.total(scorer.scores("four", {})) == 0.5 * 4 + 2 * 1
        assert all(map(math.isnan, scorer.scores("bad", {})))
    finally:
        scorer.close()


@pytest.mark.parametrize("name", ["text", "batch", "nothing", "nan", "crash"])
def test_a_function_that_never_gives_a_number_is_refused_before_anything_is_loaded(functions, tiny, name):
    row = {"messages": [{"role": "user", "content": "2 + 2?"}], "given": 1, "fields": {}, "tools": None}
    with pytest.raises(UserError, match=rf"reward=.*mine.py:{name}: no number for any of the first 2 examples: {name}"):
        scoring.check(replace(tiny, reward=f"{functions}:{name}"), [row, row])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("mine.py:missing", "no function of that name in the file; it defines good, text"),
        ("mine.py:one", r"must take two arguments, .*; write `def one\(answer, example\)`"),
        ("mine.py:three", "must take two arguments"),
        ("mine.py:named", "must take two arguments"),
        ("mine.py:later", "must not be async"),
        ("gone.py:good", "no such file"),
        ("broken.py:good", "not Python at line 2"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_running_it(functions, given, why):
    (functions.parent / "broken.py").write_text("import os\ndef good(answer, example) return 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"^reward=.*{given}: {why}"):
        own_code.check_files("reward", reward_functions(f"{functions.parent}/{given}"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["reward=none"], "reward: GRPO needs a function that scores an answer"),
        (["reward=mine.py"], "reward=mine.py: write FILE.py:FUNCTION"),
        (["reward=runs/reward/export"], "write FILE.py:FUNCTION; a function may load a reward model"),
        (["grpo.reward_weights=1,2"], "reward names 1 functions, so 1 numbers are expected"),
        (["grpo.group_size=12"], "grpo.group_size=12: global_batch_size=64 .*use global_batch_size=96"),
        (["grpo.group_size=128"], "grpo.group_size=128: .*use global_batch_size=128"),
        (["grpo.group_size=1"], "grpo.group_size=1: must be at least 2"),
        (
            ["grpo.max_new_tokens=256"],
            "no room for a prompt in sequence_length=256; use grpo.max_new_tokens=128",
        ),
        (["grpo.epsilon_high=0.1"], "must be at least grpo.epsilon=0.2"),
        (["grpo.loss=ppo"], "must be one of grpo, dapo, dr_grpo, rloo"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny, words, why):
    with pytest.raises(UserError, match=why):
        apply(tiny, words)


def test_the_launcher_looks_for_the_reward_function(tiny, functions, monkeypatch):
    monkeypatch.chdir(functions.parent)
    assert paths.locate(replace(tiny, reward="mine.py:good")).reward == f"{functions}:good"
    with pytest.raises(UserError, match="no function of that name"):
        preflight.check_data(paths.locate(replace(tiny, reward="mine.py:missing")))
    with pytest.raises(UserError, match=r"reward=other.py: no such file"):
        paths.locate(replace(tiny, reward="other.py:good"))


def test_a_reference_model_is_held_only_where_a_beta_asks_for_one(tiny):
    assert not tiny.method.asks_reference
    assert apply(tiny, ["grpo.beta=0.04"]).method.asks_reference
    assert (
        pages.find("tiny", "dpo_lora").method.asks_reference
        and not pages.find("tiny", "orpo_lora").method.asks_reference
    )


def test_the_noise_samples_the_distribution():
    """The frequencies of 20,000 draws at temperature 2 are the softmax's, and at temperature 1 they would not be."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    draws = 20_000
    noise = hooks.Noise(hooks.seeds_of(0, 0, range(draws)), 2.0, torch.device("cpu"))
    found = noise(None, logits.expand(draws, -1)).argmax(-1).bincount(minlength=4) / draws
    assert (found - (logits / 2).softmax(-1)).abs().max() < 0.015 < 0.1 < (found - logits.softmax(-1)).abs().max()


def test_the_noise_of_an_answer_does_not_depend_on_the_others():
    logits = torch.zeros(2, 50)
    both = hooks.Noise(hooks.seeds_of(1, 5, range(6, 8)), 1.0, torch.device("cpu"))
    second = hooks.Noise(hooks.seeds_of(1, 5, range(7, 8)), 1.0, torch.device("cpu"))
    for _ in range(3):  # each token has noise of its own
        assert torch.equal(both(None, logits)[1], second(None, logits[1:])[0])
    assert not torch.equal(both(None, logits)[0], both(None, logits)[1])
    assert len({*hooks.seeds_of(1, 5, range(100)), *hooks.seeds_of(1, 6, range(100))}) == 200


def test_the_losses_are_those_of_the_papers():
    clip, ratio, ones = grpo.Clip(low=0.2, high=0.3), torch.tensor([0.5, 1.0, 2.0]), torch.ones(3)
    torch.testing.assert_close(clip.surrogate(ratio, ones), -torch.tensor([0.5, 1.0, 1.3]))
    torch.testing.assert_close(clip.surrogate(ratio, -ones), torch.tensor([0.8, 1.0, 2.0]))
    assert clip.shares(ratio, ones)["clip_ratio/both"].tolist() == [False, False, True]
    assert clip.shares(ratio, -ones)["clip_ratio/both"].tolist() == [True, False, False]
    half = torch.tensor([0.5]).log()
    torch.testing.assert_close(grpo.divergence(torch.zeros(1), half), torch.tensor([0.5 + math.log(2) - 1]))
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    losses = torch.tensor([[1.0, 3.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    settings = {"epsilon_low": 0.2, "epsilon_high": 0.3, "beta": 0.0, "loss_type": "grpo"}
    trainer = SimpleNamespace(**settings, current_gradient_accumulation_steps=1, averages=Averages())
    trainer._log_probs = lambda *_: (torch.zeros(3, 3), mask.bool())
    inputs = {"advantages": -torch.ones(3), "importance_sampling_ratio": losses}
    assert grpo.RunGRPOTrainer.compute_loss(trainer, None, inputs).item() == (2 + 4 + 0) / 3


def test_groups_of_equal_rewards_are_known_where_their_mean_is_rounded():
    none = math.nan
    rewards = torch.tensor([[0.7] * 8, [0.7] * 7 + [none], [none] * 8, [0.7] * 7 + [0.70001], [0.0] * 7 + [1.0]])
    assert rewards[0].mean() != rewards[0, 0], "an advantage of rounding, from which Adam would learn"
    assert hooks.alike(rewards.view(-1, 1), 8).view(5, 8).tolist() == [[same] * 8 for same in (1, 1, 1, 0, 0)]
    constant = torch.ones(8)
    assert not hooks.alike(torch.stack([rewards[4], constant], dim=1), 8).any()
    assert hooks.alike(torch.stack([rewards[0], constant], dim=1), 8).all()


def test_the_sample_functions_score_as_they_say():
    example = {"expected": '{"name":"Ada","amount":"5.00"}'}
    right, half = example["expected"], '{"name":"Ada","amount":"6.00"}'
    assert [sample_rewards.exact_match(said, example) for said in (f" {right}\n", half)] == [1.0, 0.0]
    assert [sample_rewards.json_valid(said, example) for said in (half, half[:-1], "[1]")] == [1.0, 0.0, 0.0]
    assert [sample_rewards.same_facts(said, example) for said in (right, half, "x")] == [1.0, 0.5, 0.0]
    length = {"expected": "It is 1,250.5 km."}
    said = ("About 1250.50 km", "1250.5 miles", "1250.5", "12 km", "far")
    assert [sample_rewards.number_and_unit(one, length) for one in said] == [1.0, 0.5, 0.5, 0.0, 0.0]
    assert sample_rewards.short(right, example) == 1.0 and sample_rewards.short(2 * right, example) == 0.0


@pytest.mark.parametrize("iterations", tiered((1, 2), (2,)))
def test_it_resumes_exactly_with_its_rollouts_and_shows_the_best_and_the_worst(
    ranks, tmp_path, model_folder, conversations, functions, iterations
):
    """Step 3 is the first of two updates with a rollout: the second has to find the same answers. Then a new epoch."""
    recipe = small(
        model_folder,
        conversations,
        "zero2.json",
        reward=f"{functions}:good",
        method=replace(GRPO, iterations=iterations),
        lora=Lora(rank=4),
        save_steps=3,
        max_steps=6,  # two checkpoints are kept
        micro_batch_size=2,
        schedule=Schedule("cosine", 0.1),
    )
    recipe = replace(recipe, data=replace(recipe.data, validation=str(conversations)))
    run = run_on(ranks, replace(recipe, learning_rate=3e-3), tmp_path)
    records, answers = read_jsonl(run.metrics), read_jsonl(run.rollouts)
    gate.resume(ranks, run, tmp_path)
    assert len(records) == 6
    for row, before in zip(read_jsonl(run.metrics), records, strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio/both"):
            assert row[name] == pytest.approx(before[name], rel=1e-6, abs=1e-9), (row["step"], name)
        assert row.get("reward") == before.get("reward")
    assert read_jsonl(run.rollouts) == answers and {row["which"] for row in answers} == {"best", "worst"}
    assert all(best["reward"] >= worst["reward"] for best, worst in zip(answers[::2], answers[1::2], strict=True))
    assert "reward" in read_jsonl(run.evaluations)[-1]
    assert "Best and worst" in next(examples.rollouts(read(run.path))).title


def test_a_run_survives_answers_without_a_reward(ranks, tmp_path, model_folder, conversations):
    """Half of the answers crash the function, hang it or get no number; the others are learned from."""
    path = tmp_path / "flaky.py"
    path.write_text(
        "import os, time\n"
        "def flaky(answer, example):\n"
        "    at = len(answer) % 8\n"
        "    if answer != example['expected'] and at == 0: os._exit(1)\n"
        "    if answer != example['expected'] and at == 1: time.sleep(9)\n"
        "    if answer != example['expected'] and at == 2: return 'text'\n"
        "    if answer != example['expected'] and at == 3: raise ValueError(answer)\n"
        "    return at\n"
    )
    grpo = replace(GRPO, iterations=1, reward_seconds=0.2)
    recipe = small(model_folder, conversations, "zero2.json", method=grpo, reward=f"{path}:flaky", max_steps=3)
    run = run_on(ranks, recipe, tmp_path)
    shares = [row["rewards/failed"] for row in read_jsonl(run.metrics)]
    assert len(shares) == 3 and 0 < max(shares) < 1 and all(row["grad_norm"] > 0 for row in read_jsonl(run.metrics))


def test_a_run_folder_alone_does_not_say_which_code_scores_the_answers(tiny, functions, tmp_path, refusal):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    write_recipe(run, replace(tiny, reward=f"{functions}:good"))
    (run.checkpoints / "checkpoint-1").mkdir(parents=True)
    complete = {"layout": {}, "world_size": 1}
    (run.checkpoints / "checkpoint-1" / "complete.json").write_text(json.dumps(complete), encoding="utf-8")
    words = ["tiny", "grpo", "--resume", "--output-dir", str(run.path), "--dry-run"]
    assert "refusing to run code named only in a run folder" in refusal("launch", *words)
