"""GRPO and RLOO: on two ranks, whatever the ZeRO stage, what TRL trains alone from the same answers."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_json, write_recipe
from tests.parity import gate, plain
from tests.ranks import free_port, run_on
from tests.tiers import tiered
from tests.workers import grpo_alone, grpo_served, own_code
from tests.workers.grpo_alone import GRPO, SETTINGS
from tests.workers.trl_alone import ADAPTERS

REWARD = "def scored(answer, example):\n    return sum(map(ord, answer)) % 11 / 10\n"
NUMBERS = {
    "reward": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "completions/mean_length": "completions/mean_length",
    "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean",
}
"""What a run logs besides the loss, and what TRL calls it."""
ADVANTAGE = 0.2
"""The mean size of RLOO's advantages, with which losses are compared; of GRPO's it is larger.

A group's advantages cancel, so that a rollout's first loss is rounding and the others are little more: with adapters
TRL's own -0.010082 changes by 5e-7 when it computes in double precision.
"""


@pytest.fixture(scope="module")
def writer(model_folder, tmp_path_factory):
    """Return the model with many tokens that end an answer, so that answers differ in length."""
    folder = tmp_path_factory.mktemp("writer") / "model"
    shutil.copytree(model_folder, folder)
    config = read_json(folder / "generation_config.json")
    write_json(folder / "generation_config.json", config | {"eos_token_id": [2, *range(100, 300)]})
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "rewards.py"
    path.write_text(REWARD, encoding="utf-8")
    return f"{path}:scored"


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory, writer, conversations):
    """Return a function that trains with TRL alone, once for each case."""

    @cache
    def trained(loss: str, lora: bool, mistake: str = "") -> gate.Reference:
        output = tmp_path_factory.mktemp(f"{loss}-alone")
        arguments = (loss, str(writer), str(conversations), str(output), lora, mistake)
        ranks.check(grpo_alone.train, *arguments, log=output / "log", world_size=1)
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        return gate.Reference(json.loads((output / "records.json").read_text()), load_file(output / name))

    return trained


LOSSES = ("grpo", "dapo", "dr_grpo", "rloo")
CASES = [(loss, stage, lora) for loss in LOSSES for stage in range(4) for lora in (False, True)]


@pytest.mark.parametrize(("loss", "stage", "lora"), tiered(CASES, {("grpo", 3, False)}))
def test_same_model_as_trl_alone(ranks, tmp_path, writer, conversations, reward, alone, loss, stage, lora):
    recipe = gate.recipe_for(
        SETTINGS,
        writer,
        conversations,
        f"zero{stage}.json",
        reward=reward,
        method=replace(GRPO, loss=loss),
        lora=ADAPTERS if lora else None,
        micro_batch_size=2,
    )
    metric = f"{own_code.__file__}:overlap"
    data = replace(recipe.data, validation=str(conversations), metric=metric, max_new_tokens=GRPO.max_new_tokens)
    run = run_on(ranks, replace(recipe, data=data), tmp_path)

    reference, logged = alone(loss, lora), read_jsonl(run.metrics)
    assert [row["step"] for row in logged] == list(range(1, SETTINGS.steps + 1))
    for ours, theirs in zip(logged, reference.records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=gate.LOSS, abs=gate.LOSS * ADVANTAGE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=gate.NORM)
        for name, of_trl in NUMBERS.items():
            # TRL logs rewards and lengths only with the update that follows the rollout.
            if name in ours and of_trl in theirs:
                assert ours[name] == pytest.approx(theirs[of_trl], rel=1e-3, abs=1e-5), name
    assert {"reward", "entropy", "kl"} <= set(logged[0]) and {"clip_ratio/low", "entropy"} <= set(logged[1])
    # Adapters start at nothing: in these steps no answer becomes so much likelier that it is clipped.
    assert lora or any(row["clip_ratio/low"] or row["clip_ratio/high"] for row in logged)
    exported = load_file(run.export / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert set(exported) == set(reference.weights)
    gate.near(exported, reference.weights)
    assert read_json(run.deepspeed)["zero_optimization"]["stage"] == stage
    first, last = read_jsonl(run.evaluations)
    assert agrees_on_metric(first, writer, conversations)
    if not lora:
        assert agrees_on_metric(last, run.export, conversations) and not agrees_on_metric(last, writer, conversations)


def agrees_on_metric(measured, folder, conversations):
    """Return True if the metric of two ranks is that of the model's greedy answers, in the order of the questions."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    answers, references = [], []
    for line in conversations.read_text(encoding="utf-8").splitlines():
        *asked, answer = json.loads(line)["messages"]
        tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        written = model.generate(tokens, do_sample=False, max_new_tokens=GRPO.max_new_tokens)[0, tokens.shape[1] :]
        ended = [at for at, one in enumerate(written.tolist()) if one in model.generation_config.eos_token_id]
        answers.append(tokenizer.decode(written[: min(ended, default=len(written))]).strip())
        references.append(answer["content"].strip())
    expected = own_code.overlap(answers, references)
    found = [measured["overlap_mean"], measured["overlap_ordered"]]
    return found == pytest.approx([expected["mean"], expected["ordered"]], abs=1e-6)


MISTAKES = {"grpo": ("group", "kl", "ratio", "beta", "clip", "scale"), "rloo": ("group", "beta", "clip")}


@pytest.mark.parametrize(
    ("loss", "mistake"),
    tiered([(loss, one) for loss in MISTAKES for one in MISTAKES[loss]], {("grpo", "group"), ("grpo", "kl")}),
)
def test_a_wrong_reference_is_noticed(alone, loss, mistake):
    right, wrong = alone(loss, False), alone(loss, False, mistake)
    rightly, wrongly = ([row["loss"] for row in reference.records] for reference in (right, wrong))
    off = max(abs(ours - theirs) for ours, theirs in zip(wrongly, rightly, strict=True))
    assert off > 100 * gate.LOSS * max(map(abs, rightly))
    assert any(plain.worst(wrong.weights[name], weight) > 10 for name, weight in right.weights.items())


SERVED = {
    "right": ("nothing", 2e-2, None),
    "a tensor left out": ("model.layers.1.mlp.down_proj.weight", 2e-2, "of step 1, .* differ from the model's by"),
    "nothing transferred": ("", 2e-4, "and from those of step 0 by"),
}
"""The weights that a transfer leaves out, the learning rate, and what the run says of it."""


@pytest.mark.parametrize("transfer", tiered(SERVED, {"a tensor left out"}))
def test_a_server_with_other_weights_ends_the_run(ranks, tmp_path, writer, conversations, reward, transfer):
    left_out, rate, refused = SERVED[transfer]
    run, address = RunFolder(tmp_path / "run"), f"http://127.0.0.1:{free_port()}"
    method = replace(GRPO, iterations=1, beta=0.0, vllm=address, vllm_check_steps=1)
    settings = replace(SETTINGS, steps=3, learning_rate=rate)
    options = {"reward": reward, "method": method, "micro_batch_size": 2}
    write_recipe(run, gate.recipe_for(settings, writer, conversations, "zero3.json", **options))
    statuses = ranks.run(grpo_served.main, str(run.path), left_out, log=tmp_path / "log")
    said = "".join(file.read_text() for file in sorted(tmp_path.glob("log*")))
    assert statuses == ([2, 2] if refused else [0, 0]), said[-3000:]
    assert not refused or re.search(rf"grpo.vllm={address}: after the transfer of the weights .*{refused}", said)
