"""What held-out scores count: whole answers, sums of log-probabilities, no filler; and an export check that fails."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from recipes.spec.recipe import Layout
from recipes.training import export
from recipes.training.model.generate import generate
from recipes.training.parallel import pipeline, scores
from tests.conftest import conversation


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
def answered(model, tokenizer):
    """Return a conversation whose answer is what the model says."""
    question = conversation("Count to 3, please.", "")["messages"][:1]
    answer = generate(model, tokenizer, [question], 8)[0]
    assert answer
    return [*question, {"role": "assistant", "content": answer}]


def exact_match(model, tokenizer, conversations):
    return scores.exact_match(model, tokenizer, conversations, 8, synced_gpus=False, layout=Layout())


def test_exact_match_is_the_share_of_reproduced_answers(alone, model, tokenizer, answered):
    wrong = [answered[0], {"role": "assistant", "content": answered[1]["content"] + "!"}]
    assert exact_match(model, tokenizer, [answered, wrong, wrong, wrong]) == 0.25


def test_filler_does_not_count(second_of_two, model, tokenizer, answered):
    """Rank 1 has no example of its own, and repeats the first, which the model answers correctly."""
    assert exact_match(model, tokenizer, [answered]) == 0
    assert exact_match(model, tokenizer, [answered, answered]) == 0.5


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
    ranked = scores.preferences(patched, tokenizer, pairs, 5, Layout(), scores.log_likelihood_per_token)
    assert ranked["preference_accuracy"] == by_mean
    for per_token, expected in ((False, by_sum), (True, by_mean)):
        own = partial(scores.likelihood_by_own_head, per_token=per_token)
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
