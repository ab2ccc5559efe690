"""What held-out scores count: whole answers, sums of log-probabilities, no filler; and an export check that fails."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from deepspeed_recipes.recipe.recipe import Data, Layout
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training.data import tokenize
from deepspeed_recipes.training.data.answers import generation_prompt, question
from deepspeed_recipes.training.methods import preferences, sft
from deepspeed_recipes.training.methods.preferences import of_pairs
from deepspeed_recipes.training.model.generate import generate
from deepspeed_recipes.training.parallel import pipeline, scores
from tests.conftest import conversation
from tests.small import small
from tests.test_masks import MARKED, TOOL_TURNS, TOOLS, TURNS, WITHOUT_DESCRIPTIONS, tokenizer_with


@pytest.fixture
def second_of_two():
    """Be rank 1 of 2; sums are this rank's own."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def speaker():
    """Return the model that ships with the project, which ends its answers, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL).eval(), AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def answered(speaker):
    """Return a conversation whose answer is what the model says."""
    asked = conversation("Count to 3, please.", "")["messages"][:1]
    answer = generate(*speaker, [asked], 99)[0]
    assert answer
    return [*asked, {"role": "assistant", "content": answer}]


def sequence(tokenizer, turns, tools=None, given=0, **changes):
    """Return a conversation as it is trained on."""
    example = {"messages": turns, "tools": tools, "given": given}
    return tokenize.of_conversation(small("a model", "unread", **changes), tokenizer)(example)


def measured(model, tokenizer, sequences, longest=8):
    """Return what `exact_match` returns, and its answers."""
    seen = []
    found = scores.exact_match(
        model, tokenizer, sequences, longest, synced_gpus=False, layout=Layout(), on_answer=seen.append
    )
    return found, seen


def exact_match(model, tokenizer, conversations):
    sequences = [sequence(tokenizer, turns) for turns in conversations]
    return measured(model, tokenizer, sequences, 99)[0]["exact_match"]


class Taught:
    """A model that writes what it has learned from its sequences, token by token, or `instead`."""

    device = "cpu"

    def __init__(self, tokenizer, sequences, ends=None, instead=None):
        self.padding, self.sequences, self.instead = tokenizer.pad_token_id, sequences, instead
        self.generation_config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id if ends is None else ends)

    def generate(self, input_ids, attention_mask, max_new_tokens, **_):
        answers = []
        for tokens, mask in zip(input_ids, attention_mask, strict=True):
            prompt = tokens[mask.bool()].tolist()
            known = [one["input_ids"] for one in self.sequences if one["input_ids"][: len(prompt)] == prompt]
            answers.append((self.instead or known[0][len(prompt) :])[:max_new_tokens])
        width = max(map(len, answers))
        padded = [answer + [self.padding] * (width - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


CONVERSATIONS = {
    "an answer": (TURNS[:2], None),
    "the second answer": (TURNS, None),
    "an answer before a question": (TURNS[:3], None),
    "a tool call": (TOOL_TURNS[:2], TOOLS),
    "an answer with a tool's result": (TOOL_TURNS, TOOLS),
}


@pytest.mark.parametrize("name", MARKED)
def test_a_model_that_writes_what_it_was_taught_is_right(alone, name):
    """With every template: think blocks, headers and tool calls are part of what it was taught."""
    tokenizer = tokenizer_with(name)
    without_tools = name in ("cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5")
    for what, (turns, tools) in CONVERSATIONS.items():
        if tools and without_tools:
            continue
        tools = None if name in WITHOUT_DESCRIPTIONS else tools
        learned = sequence(tokenizer, turns, tools)
        found, (answer,) = measured(Taught(tokenizer, [learned]), tokenizer, [learned], 60)
        assert found == {"exact_match": 1.0}, (what, answer)
        if turns[1]["content"]:
            assert ("No." if what == "the second answer" else "Yes.") in answer.text, what
        assert ("Adds." in answer.prompt) == ("Adds." in tokenizer.decode(learned["input_ids"])), what
        other = sequence(
            tokenizer, [*turns[: len(turns) // 2 * 2 - 1], {"role": "assistant", "content": "Never."}], tools
        )
        of_other = other["input_ids"][len(question(learned, generation_prompt(tokenizer)).prompt) :]
        wrong, _ = measured(Taught(tokenizer, [], instead=of_other), tokenizer, [learned], 60)
        assert wrong["exact_match"] == 0, what
        logits = torch.nn.functional.one_hot(torch.tensor([[*learned["input_ids"][1:], 0]])).float()
        labels = torch.tensor([[*learned["labels"][1:], IGNORED]])
        assert pipeline.losses_and_mistakes(logits, labels)[0, 1] == 0, "a pipeline finds the same"


def test_the_generation_prompt_is_given_where_it_is_in_the_loss_and_not_where_training_has_another():
    def asked(name):
        tokenizer = tokenizer_with(name)
        return tokenizer.decode(question(sequence(tokenizer, TURNS[:2]), generation_prompt(tokenizer)).prompt)

    assert asked("gptoss").endswith("<|start|>assistant")
    assert asked("qwen3").endswith("<|im_start|>assistant\n")
    assert asked("qwen3_5_nothink").endswith("<think>\n\n</think>\n\n")
    assert asked("qwen3_5_think").endswith("<|im_start|>assistant\n<think>\n")
    assert asked("deepseekv3").endswith("Hi?"), "its generation prompt opens a think block, and training has none"
    assert asked("nemotron_3_nano").endswith("<|im_start|>assistant\n")


def test_reasoning_that_is_not_learned_is_given():
    tokenizer = tokenizer_with("qwen3")
    turns = [TURNS[0], {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
    opening = generation_prompt(tokenizer)
    found = {
        name: question(sequence(tokenizer, turns, data=Data(path="unread", thinking=name)), opening)
        for name in ("learn", "read", "strip")
    }
    said = {name: tokenizer.decode(one.answer) for name, one in found.items()}
    assert said["learn"] == "<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"
    assert said["read"] == "\n\nYes.<|im_end|>\n" and "Hm." in tokenizer.decode(found["read"].prompt)
    assert said["strip"] == "<think>\n\n</think>\n\nYes.<|im_end|>\n"


@pytest.mark.parametrize(
    ("written", "ends", "right", "cut_off"),
    [
        ("Yes.<|im_end|>\n", [2], True, False),
        ("Yes.<|im_end|>Hi?", [2], True, False),
        ("Yes.", [2], False, True),
        ("Yes." + " and so on" * 9, [2], False, True),
        (" Yes. <|im_end|>", [2], True, False),
        ("Yes!<|im_end|>", [2], False, False),
        ("yes.<|im_end|>", [2], False, False),
        ("<|im_end|>", [2], False, False),
        ("<|im_start|>Yes.<|im_end|>", [2], False, False),
        ("Yes.<|end|>", [0, 2], True, False),
    ],
)
def test_what_counts_as_the_same_answer(alone, written, ends, right, cut_off):
    """Up to white space at its ends and the token that ends it, of which a model may have several; never cut off."""
    tokenizer = tokenizer_with("qwen3_instruct_2507")
    learned = sequence(tokenizer, TURNS[:2])
    model = Taught(tokenizer, [], ends, instead=tokenizer(written, add_special_tokens=False)["input_ids"])
    found, (answer,) = measured(model, tokenizer, [learned], 12)
    assert (bool(found["exact_match"]), bool(found.get("cut_off"))) == (right, cut_off), answer


def test_an_answer_longer_than_the_limit_is_wrong_and_counted_as_cut_off(alone):
    tokenizer = tokenizer_with("qwen3_instruct_2507")
    turns = [TURNS[0], {"role": "assistant", "content": "word " * 30}]
    learned = [sequence(tokenizer, turns), sequence(tokenizer, TURNS[2:])]
    assert measured(Taught(tokenizer, learned), tokenizer, learned, 12)[0] == {"exact_match": 0.5, "cut_off": 0.5}
    assert measured(Taught(tokenizer, learned), tokenizer, learned, 99)[0] == {"exact_match": 1.0}


def test_an_answer_may_be_empty_and_may_hold_control_tokens(alone):
    tokenizer = tokenizer_with("qwen3_instruct_2507")
    for content in ("", "a <|im_start|>b"):
        turns = [TURNS[0], {"role": "assistant", "content": content}]
        learned = sequence(tokenizer, turns)
        found, (answer,) = measured(Taught(tokenizer, [learned]), tokenizer, [learned], 60)
        assert found["exact_match"] == 1 and answer.text == content


def test_an_answer_without_a_learned_end_is_compared_as_far_as_it_goes(alone):
    tokenizer = tokenizer_with("qwen3_instruct_2507")
    learned = sequence(tokenizer, TURNS[:2])
    answer = tokenizer("Yes.", add_special_tokens=False)["input_ids"]
    start = learned["input_ids"].index(answer[0], 5)
    learned["labels"] = [*learned["labels"][: start + len(answer)], *[IGNORED] * 9][: len(learned["input_ids"])]
    on = tokenizer("Yes. And then some more.", add_special_tokens=False)["input_ids"]
    assert on[: len(answer)] == answer
    found, _ = measured(Taught(tokenizer, [], instead=on), tokenizer, [learned], 12)
    assert found == {"exact_match": 1.0}


def test_exact_match_is_the_share_of_reproduced_answers(alone, speaker, answered):
    wrong = [answered[0], {"role": "assistant", "content": answered[1]["content"] + "!"}]
    assert exact_match(*speaker, [answered, wrong, wrong, wrong]) == 0.25


def test_filler_does_not_count(second_of_two, speaker, answered):
    """Rank 1 has no example of its own, and repeats the first, which the model answers correctly."""
    assert exact_match(*speaker, [answered]) == 0
    assert exact_match(*speaker, [answered, answered]) == 0.5


def pair(chosen, rejected):
    prompt = [{"role": "user", "content": "Count, please."}]
    return {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


@torch.no_grad()
def log_probabilities(model, tokenizer, prompt, answer):
    """Return the log-probability of each token of an answer, computed plainly."""
    start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
    tokens = torch.tensor([tokenizer.apply_chat_template(prompt + answer, return_dict=True)["input_ids"]])
    chosen = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return chosen[start - 1 :]


def test_a_preference_is_between_whole_answers_not_between_their_average_tokens(alone, model_folder, model, tokenizer):
    """Sums of log-probabilities: with means, some of these pairs would be ranked the other way round."""
    pairs = [pair("7", " ".join(str(n + k) for k in range(3))) for n in range(12)]
    scored = [[log_probabilities(model, tokenizer, p["prompt"], p[of]) for of in ("chosen", "rejected")] for p in pairs]
    by_sum = sum(bool(one.sum() > other.sum()) for one, other in scored) / len(pairs)
    by_mean = sum(bool(one.mean() > other.mean()) for one, other in scored) / len(pairs)
    assert by_sum != by_mean
    patched = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    add_fused_lm_head(patched)
    ranked = scores.preferences(patched, tokenizer, pairs, 5, Layout(), scores.log_likelihood)
    assert ranked["preference_accuracy"] == by_sum
    ranked = scores.preferences(patched, tokenizer, pairs, 5, Layout(), partial(scores.log_likelihood, per_token=True))
    assert ranked["preference_accuracy"] == by_mean
    for per_token, expected in ((False, by_sum), (True, by_mean)):
        own = partial(scores.log_likelihood, per_token=per_token, own_head=True)
        assert scores.preferences(model, tokenizer, pairs, 5, Layout(), own)["preference_accuracy"] == expected


IGNORED = -100
LABELS = torch.tensor([[IGNORED, 1, 2, IGNORED, IGNORED, 3, 4, IGNORED]])
"""Two answers, of tokens 1 and 2, and 3 and 4."""


@pytest.mark.parametrize(("said", "mistakes"), [([1, 2, 3, 4], 0), ([0, 0, 3, 4], 0), ([1, 2, 3, 0], 1), ([0] * 4, 2)])
def test_a_pipeline_judges_the_last_answer_only(said, mistakes):
    logits = torch.zeros(1, 8, 6)
    logits[0, LABELS[0] != IGNORED, said] = 5.0
    logits[0, LABELS[0] == IGNORED, 5] = 5.0
    loss, wrong = pipeline.losses_and_mistakes(logits, LABELS)[0]
    assert wrong == mistakes
    learned = torch.nn.functional.cross_entropy(logits[0], LABELS[0], ignore_index=IGNORED, reduction="sum")
    assert loss == pytest.approx(learned.item()), "the loss is that of all answers"


def test_a_pipelines_loss_is_not_rounded_at_the_size_of_its_logits():
    logits = torch.full((1, 8, 1000), 18.0)
    logits[0, range(8), LABELS[0].clamp(min=0)] = 38.3  # where fp32 numbers are 4e-6 apart
    exact = torch.nn.functional.cross_entropy(logits[0].double(), LABELS[0], ignore_index=IGNORED, reduction="sum")
    assert pipeline.losses_and_mistakes(logits, LABELS)[0, 0] == pytest.approx(exact.item(), rel=0.2)


def test_an_export_that_computes_something_else_fails_its_check(alone, model_folder, model):
    def verify(forward, dtype=torch.float32):
        return export.verify(forward, dtype, model_folder, list(range(5, 20)))

    def off(share):
        def forward(tokens):
            logits = model(input_ids=tokens).logits
            changed = logits.clone()
            changed[0, 3, 7] += share * logits.abs().max()
            return changed

        return forward

    assert verify(off(0)) < 1e-6
    assert verify(off(5e-5)) == pytest.approx(5e-5, rel=0.1)
    for share in (2e-4, 1.0, float("nan")):
        with pytest.raises(RuntimeError, match=r"reloaded logits differ by .* of the largest \(allowed 1e-04\)"):
            verify(off(share))
    with pytest.raises(RuntimeError, match="allowed 3e-02"):
        verify(off(0.1), torch.bfloat16)


@pytest.mark.parametrize(("examples", "sizes"), [(5, [2, 2, 1]), (4, [2, 2]), (1, [1])])
def test_examples_are_scored_in_as_few_passes_as_they_need(alone, examples, sizes):
    batches = list(scores.rank_batches(list(range(examples)), 2, Layout()))
    assert [count for _, count in batches] == sizes
    assert [one for batch, count in batches for one in batch[:count]] == list(range(examples))


def test_ranks_share_the_passes_and_fill_up_the_last(second_of_two):
    assert list(scores.rank_batches(list(range(5)), 2, Layout())) == [([1, 3], 2), ([0], 0)]


def test_mean_log_probabilities_count_what_is_named_of_each_sequence():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    counted = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])  # a first token has no log-probability
    assert preferences.mean_of(log_probs, counted).tolist() == [-2.5, -4.0]


def test_preferences_are_means_over_all_pairs(alone):
    rewards = {"chosen": torch.tensor([3.0, 1.0]), "rejected": torch.tensor([1.0, 2.0])}

    def value(model, tokenizer, batch, side):
        return torch.stack([rewards[side][number] for number in batch])

    found = scores.preferences(None, None, [0, 1], 1, Layout(), value)
    assert found == {"preference_accuracy": 0.5, "preference_margin": 0.5}


def test_the_rewards_of_pairs_are_logged_with_their_margin():
    found = of_pairs(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0]))
    assert found["rewards/margins"].tolist() == [2.0, -1.0] and found["rewards/accuracies"].tolist() == [True, False]


def test_sample_questions_that_do_not_fit_are_named(tokenizer, capsys):
    turns = conversation("Count to 3, please.", "1, 2, 3")["messages"]
    long = conversation("Count. " * 40, "1, 2, 3")["messages"]
    sequences = [sequence(tokenizer, one, sequence_length=512) for one in (long, turns, turns)]
    opening, prompt = generation_prompt(tokenizer), len(question(sequences[1], ()).prompt)

    def asked(count, longest, room):
        recipe = small("a model", "unread", sequence_length=room, micro_batch_size=1)
        data = replace(recipe.data, sample_answers=count, max_new_tokens=longest)
        return sft.questions(replace(recipe, data=data), sequences, opening)

    for count, room, sizes in ((3, 512, [3]), (3, 2 * (prompt + 40), [2]), (2, prompt + 40, [1, 1]), (3, 40, [])):
        batches, longest = asked(count, 40, room)
        assert longest == 40 and [len(batch) for batch in batches] == sizes
        few = sum(sizes) < count
        assert (f"data.sample_answers=3: {sum(sizes)} of the first" in capsys.readouterr().out) == few
    assert asked(None, 96, 512)[1] == sft.LONGEST_SHOWN
