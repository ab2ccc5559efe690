"""QLoRA with its 4-bit weights sharded by ZeRO-3 trains the adapters that one process trains without DeepSpeed."""

from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from deepspeed_recipes.recipe.recipe import Lora, Model
from deepspeed_recipes.recipe.run_folder import read_json
from deepspeed_recipes.training.model import lora as adapters
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.small import with_zero
from tests.tiers import tiered
from tests.workers import adapters as worker

SETTINGS = plain.Settings()
LORA = Lora(rank=4, alpha=8)
SEED = 42


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(
        model_folder, conversations, SETTINGS, prepare=lambda whole: in_4_bits(model_folder, whole.dtype)
    )


def in_4_bits(folder, dtype, lora=LORA):
    """Return the model with adapters on 4-bit weights, as one process loads it."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=adapters.nf4(dtype))
    return adapters.add(base.train(), lora, SEED)  # in evaluation bitsandbytes multiplies in bf16 on some CPUs


@pytest.mark.parametrize("stage", tiered((1, 2, 3), (3,)))
def test_adapters_on_4_bit_weights_train_as_in_one_process(
    ranks, tmp_path, model_folder, conversations, reference, stage
):
    file = with_zero(tmp_path, "zero3_adapters.json", stage3_param_persistence_threshold=0)
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, file if stage == 3 else f"zero{stage}.json")
    model = Model(path=str(model_folder), quantization="nf4")
    recipe = replace(recipe, model=model, lora=LORA, micro_batch_size=4, seed=SEED)
    run = run_on(ranks, recipe, tmp_path, function=worker.main)

    records, weights = reference
    gate.agree_on_adapters(run, records, weights)
    found = read_json(worker.path_of(run))
    assert found["changed"] == [] and found["moved"]
    assert found["held"] == pytest.approx(0.5 if stage == 3 else 1, abs=0.01)


def test_weights_in_16_bits_would_be_noticed(model_folder, conversations, reference):
    """The mutation: without quantisation the same adapters train to something else."""
    records, _ = plain.train(
        model_folder, conversations, SETTINGS, prepare=lambda whole: adapters.add(whole, LORA, SEED)
    )
    assert records[-1]["loss"] != pytest.approx(reference[0][-1]["loss"], rel=100 * gate.LOSS)
