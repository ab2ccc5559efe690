"""`ds-recipes certify` of what a real vLLM answers: every form of an export agrees, and a server's faults are found."""

import json
import shutil
import subprocess
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed_recipes.export import certificate
from deepspeed_recipes.export.serve import engines, environment, process, served
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.recipe import Draft
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training import server as client
from deepspeed_recipes.training.model import draft
from deepspeed_recipes.training.model_folder import base_model, complete, expected
from deepspeed_recipes.training.server import Server
from tests.ranks import free_port
from tests.servers import NO_SERVING
from tests.test_certify import adapter, answers, change, trained, whole

__all__ = ["adapter", "whole"]
pytestmark = [NO_SERVING, pytest.mark.every]


@contextmanager
def vllm(found: served.Served, place: Path):
    """Yield the address of a vLLM that serves `found`, which need not be what was trained."""
    port = free_port()
    engine = engines.build("vllm", found, "127.0.0.1", port, place)
    with process.running(engine, found.asked, "127.0.0.1", port, place / "log"):
        yield process.address("127.0.0.1", port)


def altered(folder: Path, place: Path, change_weights) -> Path:
    """Copy an adapter beside its base, with other weights, as a server could read them."""
    shutil.copytree(folder, place)
    config = read_json(place / base_model.ADAPTER)
    write_json(place / base_model.ADAPTER, config | {base_model.KEY: str(base_model.find(folder))})
    change(place, change_weights)
    return place


def halved(tensors):
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name] = tensors[name] / 2


def one_layer_left_out(tensors):
    for name in [name for name in tensors if "layers.1." in name and "lora_B" in name]:
        tensors[name] = torch.zeros_like(tensors[name])


FAULTS = {"scaled": halved, "a layer left out": one_layer_left_out}


def test_an_adapter_agrees_and_a_server_that_applies_it_otherwise_does_not(adapter, tmp_path):
    """The folder is as it was written: only the server's answers tell."""
    found = served.find(adapter, "right", [])
    wrong = {name: altered(adapter, tmp_path / name.replace(" ", "-"), fault) for name, fault in FAULTS.items()}
    others = tuple(served.Adapter(folder.name, folder, 4) for folder in wrong.values())
    with vllm(replace(found, adapters=(*found.adapters, *others)), tmp_path) as url:
        right = certificate.of_server(Server(url, "right"), adapter)
        assert right.agrees and right.difference < 1e-4, (str(right), right.causes)
        left_out = certificate.of_server(Server(url, "base"), adapter)
        assert left_out.like_base and not left_out.agrees and not left_out.causes
        for name, folder in wrong.items():
            differing = certificate.of_server(Server(url, folder.name), adapter)
            assert not differing.agrees and not differing.causes, (name, str(differing))


def test_an_adapter_on_another_base_differs(adapter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base_model.find(adapter), other)
    change(other, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.5))
    with vllm(replace(served.find(adapter, "mine", []), model=other), tmp_path) as url:
        found = certificate.of_server(Server(url, "mine"), adapter)
    assert not found.agrees and not found.like_base and not found.causes, str(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_agree_in_the_dtype_of_the_training(dtype, whole, tmp_path, printed_by):
    folder = whole
    if dtype == "bfloat16":
        folder, model = tmp_path / "half", export.load(whole, dtype=torch.bfloat16).eval()
        model.save_pretrained(folder)
        export.load_tokenizer(whole).save_pretrained(folder)
        examples, measured, _ = answers(model, export.load_tokenizer(whole))
        expected.write(folder, examples, model.dtype, measured)
    found = json.loads(printed_by("certify", folder, "--server", "vllm", "--json"))
    assert found["bound"] == certificate.BOUNDS[dtype]
    assert found["difference"] < (1e-4 if dtype == "float32" else certificate.BOUNDS[dtype])


def test_an_adapter_ends_its_turn_where_it_was_trained_to(adapter, tmp_path):
    """Not where its base does: the generation config next to the adapter has the end, and vLLM reads it there."""

    def answer(folder):
        found = served.find(folder, "mine", [])
        with vllm(found, tmp_path) as url:
            words = {"model": "mine", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions",
                json.dumps(words | {"max_tokens": 24, "return_token_ids": True}).encode(),
                {"Content-Type": "application/json"},
            )
            return json.load(urllib.request.urlopen(asked))["choices"][0]

    before = answer(adapter)
    end = before["token_ids"][5]
    other = altered(adapter, tmp_path / "other", lambda tensors: None)
    write_json(other / "generation_config.json", {"eos_token_id": [end]})
    after = answer(other)
    first = before["token_ids"].index(end)
    assert after["finish_reason"] == "stop" and after["token_ids"][: first + 1] == before["token_ids"][: first + 1]
    assert len(after["token_ids"]) == first + 1


ROTATE = """
import torch, vllm._C
from vllm import _custom_ops as ops

angles = torch.arange(4.0)[:, None] * torch.arange(1.0, 17)
table = torch.cat([angles.cos(), angles.sin()], -1)
rotate = lambda one: ops.rotary_embedding(torch.arange(4), one, one.clone(), 32, table, True)
flat = torch.randn(4, 128)
by_heads = flat.clone().view(4, 4, 32)
rotate(flat), rotate(by_heads)
print(torch.allclose(flat, by_heads.view(4, 128), atol=1e-5))
"""


def test_vllm_answers_as_lfm2_only_without_its_kernel_that_rotates(tmp_path):
    """`--compilation-config` in `engines.vllm` can go once the kernel for CPUs takes a dimension for the heads."""
    words = [str(environment.python("vllm")), "-c", ROTATE]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1] == "False"
    folder, recipe = tmp_path / "lfm2", pages.find("lfm2-350m", "full")
    draft.write(replace(recipe, draft=Draft(enabled=True, hidden_size=128)), folder, torch.float32)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"block_dim": 128, "conv_dim": 128})
    model = export.load(folder).eval()
    examples, measured, _ = answers(model, export.load_tokenizer(folder))
    expected.write(folder, examples, model.dtype, measured)
    with vllm(served.find(folder, "mine", []), tmp_path) as url:
        found = certificate.of_server(Server(url, "mine"), folder)
    assert found.agrees and found.difference < 1e-4, str(found)


def test_vllm_drafts_with_the_head_for_a_further_token(tmp_path):
    """Each token of this model follows from the one before it alone, so that a head that is read right is never off.

    Of DeepSeek V3's draft it reads the head, too, and then has no kernel on CPUs for its small latent attention.
    """
    folder, recipe = tmp_path / "model", pages.find("glm4_5-air", "full")
    model = replace(recipe.model, train_mtp=True)
    draft.write(replace(recipe, model=model, draft=Draft(enabled=True, hidden_size=128)), folder, torch.float32)

    def follow_alone(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("eh_proj.weight"):
                tensor.copy_(torch.eye(*tensor.shape))  # the next token's embedding, and nothing of the hidden state
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    change(folder, follow_alone)
    whole = export.load(folder).eval()
    examples, measured, _ = answers(whole, export.load_tokenizer(folder))
    expected.write(folder, examples, whole.dtype, measured)
    port, found = free_port(), served.find(folder, "mine", [])
    engine = engines.build("vllm", found, "127.0.0.1", port, tmp_path)
    words = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))
    with process.running(replace(engine, command=engine.command + words), "mine", "127.0.0.1", port, tmp_path / "log"):
        url = process.address("127.0.0.1", port)
        certified = certificate.of_server(Server(url, "mine"), folder)
        client.answers(
            Server(url, "mine"), [[{"role": "user", "content": "Hello"}]], {"temperature": 0, "max_tokens": 32}
        )
        lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    assert certified.agrees and certified.difference < 1e-4, str(certified)
    drafted, accepted = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_num_{kind}_tokens_total"))
        for kind in ("draft", "accepted")
    )
    assert drafted > 8 and accepted > 0.9 * drafted, (drafted, accepted)


def test_a_head_that_was_untied_and_is_served_tied_differs(tmp_path):
    """The head was trained apart from the embedding; a config.json that ties them lets a server leave the head out."""
    folder = tmp_path / "untied"
    model, tokenizer = trained(Path(TINY_MODEL))
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1.2)
    model.all_tied_weights_keys = {}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    examples, found, _ = answers(model, tokenizer)
    expected.write(folder, examples, model.dtype, found)
    tied = tmp_path / "tied"
    shutil.copytree(folder, tied)
    write_json(tied / "config.json", read_json(tied / "config.json") | {"tie_word_embeddings": True})
    tensors = load_file(tied / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, tied / "model.safetensors", {"format": "pt"})
    with vllm(served.find(tied, "tied", []), tmp_path) as url:
        found = certificate.of_server(Server(url, "tied"), folder)
    assert not found.agrees and not found.causes, str(found)


def test_another_chat_template_is_found_by_its_number_of_tokens(whole, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    (other / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    complete.of_copy(other, whole, other)
    with vllm(served.find(other, "other", []), tmp_path) as url:
        found = certificate.of_server(Server(url, "other"), whole)
    assert not found.agrees and found.difference < 1e-4
    assert len(found.causes) == 1 and "the server's chat template makes" in found.causes[0]
