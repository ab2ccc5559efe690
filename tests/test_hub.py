"""The comparison of pages with the Hub, on a local folder of the same form; these tests use no network."""

from dataclasses import replace

from transformers import AutoConfig

from deepspeed_recipes.commands import main, page
from deepspeed_recipes.recipe import pages


def test_a_page_that_matches_the_model_has_no_differences(tmp_path):
    model = pages.page("llama3").SIZES["8b"]
    AutoConfig.for_model(**model.config).save_pretrained(tmp_path)
    assert page.compare(replace(model, path=str(tmp_path))) == []


def test_every_other_dimension_is_named(tmp_path):
    model = pages.page("llama3").SIZES["8b"]
    AutoConfig.for_model(**model.config | {"hidden_size": 2048, "num_hidden_layers": 16}).save_pretrained(tmp_path)
    assert page.compare(replace(model, path=str(tmp_path))) == [
        "hidden_size: the page has 4096, the Hub 2048",
        "num_hidden_layers: the page has 32, the Hub 16",
    ]


def test_without_a_network_it_says_so(capsys):
    assert main.run("page", ["compare", "llama3-8b"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main.run("page", ["compare", "llama4-8b"]) == 2
    assert "unknown recipe 'llama4'" in capsys.readouterr().err
