"""A model's generation settings are valid before the first step, so that nothing fails when it is saved."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.training.model import generate
from deepspeed_recipes.training.model.draft import TINY_MODEL

WHOLE = ("top_k", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "max_length")


class Model:
    """Holds generation settings, as a model of transformers does."""

    def __init__(self, folder):
        generate.check_settings(str(folder))
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self.config = AutoConfig.from_pretrained(TINY_MODEL)


def corrected(folder, **settings):
    (folder / generate.FILE).write_text(json.dumps(settings))
    model = Model(folder)
    line = generate.correct_settings(model, str(folder))
    model.generation_config.save_pretrained(folder / "saved")
    return line, {key: value for key, value in json.loads((folder / "saved" / generate.FILE).read_text()).items()}


@pytest.mark.parametrize(
    ("settings", "said", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, "do_sample=True", {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"top_k": 1}, "do_sample=True", {"do_sample": True, "top_k": 1}),
        ({"temperature": 0.0, "top_p": 0.6}, "temperature is unset, top_p is unset", {}),
        ({"early_stopping": True}, "early_stopping is unset", {}),
        ({"output_scores": True, "temperature": 0.5}, "do_sample=True, output_scores is unset", {"do_sample": True}),
        ({"pad_token_id": -1}, "pad_token_id is unset", {}),
        ({"pad_token_id": 10**6}, "pad_token_id is unset", {}),
        ({"eos_token_id": [2, 10**6]}, "eos_token_id=[2]", {"eos_token_id": [2]}),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=False, temperature is unset", {}),
        ({"do_sample": True, "top_k": -1}, "top_k=0", {"do_sample": True, "top_k": 0}),
    ],
)
def test_invalid_settings_are_corrected_as_transformers_advises(settings, said, kept, tmp_path):
    line, saved = corrected(tmp_path, **settings)
    assert line.endswith(f"corrected: {said}") and str(tmp_path) in line
    assert kept.items() <= saved.items() and set(saved) <= {*kept, *settings, "transformers_version"}


def test_valid_settings_stay_as_they_are(tmp_path):
    settings = {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2], "stop_strings": ["a"]}
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    line, saved = corrected(tmp_path, **settings)
    assert torch.equal(before, torch.random.get_rng_state()), "the run's random numbers stay the same"
    assert line is None and settings.items() <= saved.items()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[1]", "Correct the file"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ('{"num_return_sequences": 3}', "num_return_sequences"),
        ('{"temperature": "0.9"}', "temperature='0.9'"),
        ('{"eos_token_id": "</s>"}', "eos_token_id='</s>'"),
        ('{"watermarking_config": {"foo": 1}}', "foo"),
        ('{"eos_token_id": 1000000}', "eos_token_id=1000000: the model has 1152 tokens"),
        ('{"do_sample": true, "temperature": -0.5}', "temperature=-0.5: must be above 0"),
        ('{"num_beams": 0}', "num_beams=0: must be at least 1"),
        ('{"bad_words_ids": [2]}', "bad_words_ids"),
        ('{"forced_eos_token_id": 99999}', "out of bounds"),
        ('{"do_sample": true, "top_k": 50.0}', "top_k"),
        ('{"stop_strings": [5]}', "stop_strings=[5]: must be text"),
        ('{"stop_strings": {"a": 1}}', "must be text or a list of texts"),
        ('{"stop_strings": ["ok", ""]}', "must be text or a list of texts"),
        ('{"exponential_decay_length_penalty": [1]}', "cannot generate with these settings"),
    ],
)
def test_what_nothing_corrects_is_refused_with_the_file(text, word, tmp_path):
    (tmp_path / generate.FILE).write_text(text)
    with pytest.raises(UserError, match=generate.FILE) as caught:
        generate.correct_settings(Model(tmp_path), str(tmp_path))
    assert word in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_transformers_generates_with_whatever_is_not_refused():
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    refused = 0
    for name, bounds in generate.LIMITS.items():
        for value in (-1, 0, 1) if name in WHOLE else (-0.5, 0.0, 0.5, 1.0, 1.5):
            settings = GenerationConfig(**{name: value, "do_sample": "num" not in name, "max_new_tokens": 2})
            if bounds.broken_by(value):
                refused += 1
            else:
                model.generate(torch.tensor([[5, 6]]), generation_config=settings)
    assert refused > len(generate.LIMITS)


def test_transformers_still_refuses_to_save_what_it_loads(tmp_path):
    (tmp_path / generate.FILE).write_text('{"temperature": 0.9}')
    with pytest.raises(ValueError, match="invalid"):
        GenerationConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
