"""A model's generation settings are valid before the first step, so that nothing fails when it is saved."""

import json

import pytest
from transformers import GenerationConfig

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.training.model import generation_settings


class Model:
    """Holds generation settings, as a model of transformers does."""

    def __init__(self, folder):
        generation_settings.check(str(folder))
        self.generation_config = GenerationConfig.from_pretrained(folder)


def corrected(folder, **settings):
    (folder / generation_settings.FILE).write_text(json.dumps(settings))
    model = Model(folder)
    line = generation_settings.correct(model, str(folder))
    model.generation_config.save_pretrained(folder / "saved")
    return line, {
        key: value for key, value in json.loads((folder / "saved" / generation_settings.FILE).read_text()).items()
    }


@pytest.mark.parametrize(
    ("settings", "said", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, "do_sample=True", {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"top_k": 1}, "do_sample=True", {"do_sample": True, "top_k": 1}),
        ({"temperature": 0.0, "top_p": 0.6}, "temperature is unset, top_p is unset", {}),
        ({"early_stopping": True}, "early_stopping is unset", {}),
        ({"output_scores": True, "temperature": 0.5}, "do_sample=True, output_scores is unset", {"do_sample": True}),
        ({"pad_token_id": -1}, "pad_token_id is unset", {}),
    ],
)
def test_invalid_settings_are_corrected_as_transformers_advises(settings, said, kept, tmp_path):
    line, saved = corrected(tmp_path, **settings)
    assert line.endswith(f"corrected: {said}") and str(tmp_path) in line
    assert kept.items() <= saved.items() and set(saved) <= {*kept, *settings, "transformers_version"}


def test_valid_settings_stay_as_they_are(tmp_path):
    settings = {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2]}
    line, saved = corrected(tmp_path, **settings)
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
    ],
)
def test_what_nothing_corrects_is_refused_with_the_file(text, word, tmp_path):
    (tmp_path / generation_settings.FILE).write_text(text)
    with pytest.raises(UserError, match=generation_settings.FILE) as caught:
        generation_settings.correct(Model(tmp_path), str(tmp_path))
    assert word in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_transformers_still_refuses_to_save_what_it_loads(tmp_path):
    (tmp_path / generation_settings.FILE).write_text('{"temperature": 0.9}')
    with pytest.raises(ValueError, match="invalid"):
        GenerationConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
