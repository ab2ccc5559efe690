"""`ds-recipes certify`: an export agrees with the trained model; a copy that differs is found, with the cause."""

import base64
import json
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.commands import certify
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import certificate
from deepspeed_recipes.export.serve import environment
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.compatibility import EXPERT_COUNTS
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft
from deepspeed_recipes.recipe.run_folder import read_json
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training import server as client
from deepspeed_recipes.training.model import draft, load, lora
from deepspeed_recipes.training.model_folder import base_model, complete, expected, record
from deepspeed_recipes.training.server import Server
from tests.tiers import tiered

ADAPTER = "adapter_model.safetensors"


def trained(base: Path):
    """Return a model that writes otherwise than the tiny one, and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    return model, AutoTokenizer.from_pretrained(base)


def answers(model, tokenizer, base=None):
    examples = expected.sequences(tokenizer)
    found = expected.measured(lambda tokens: model(input_ids=tokens).logits, examples)
    return examples, found, base and expected.measured(lambda tokens: base(input_ids=tokens).logits, examples)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Write the export of a run that has trained all weights."""
    folder = tmp_path_factory.mktemp("whole") / "export"
    model, tokenizer = trained(Path(TINY_MODEL))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight) if weight.dim() > 1 else 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    examples, found, _ = answers(model, tokenizer)
    expected.write(folder, examples, model.dtype, found)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Write the export of a run that has trained an adapter."""
    place = tmp_path_factory.mktemp("adapter")
    base = place / "base"
    shutil.copytree(TINY_MODEL, base)
    model, tokenizer = trained(base)
    settings = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    plain, _ = trained(base)
    model = get_peft_model(model, settings).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    model.save_pretrained(place / "export")
    tokenizer.save_pretrained(place / "export")
    examples, found, without = answers(model, tokenizer, plain)
    expected.write(place / "export", examples, torch.float32, found, without)
    return place / "export"


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "copy"))


def change(folder: Path, change_weights) -> None:
    file = folder / (ADAPTER if (folder / ADAPTER).exists() else "model.safetensors")
    tensors = load_file(file)
    change_weights(tensors)
    save_file(tensors, file, {"format": "pt"})


def edit(folder: Path, name: str, **values) -> None:
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(content | values))


def test_sixteen_texts_are_compared_and_none_is_of_the_data():
    examples = expected.sequences(AutoTokenizer.from_pretrained(TINY_MODEL))
    assert len(examples) == len({example["answer"] for example in examples}) == 16
    assert all(0 < example["start"] < len(example["tokens"]) for example in examples)


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_an_export_agrees(kind, request, printed_by):
    folder = request.getfixturevalue(kind)
    found = certificate.of_folder(folder)
    assert found.agrees and found.difference < 1e-4 and not found.causes
    named = [str(base_model.find(folder)), "--adapter", f"mine={folder}"] if kind == "adapter" else [str(folder)]
    assert "agrees with the trained model" in printed_by("certify", *named)


def test_a_model_that_is_split_over_devices_agrees(whole, adapter, tmp_path, monkeypatch):
    """As over several GPUs, accelerate brings a layer and its input together; here some layers are on the disk."""
    room = {"max_memory": {"cpu": 6 * 2**20}, "offload_folder": str(tmp_path)}
    monkeypatch.setattr(export, "device_map", lambda folder: {"device_map": "auto", **room})
    assert set(export.load(whole, placed=True).hf_device_map.values()) == {"cpu", "disk"}
    found = certificate.of_folder(whole)
    assert found.agrees and found.difference < 1e-4, (str(found), found.causes)
    with pytest.raises(UserError, match="larger than the GPUs' and the host's memory"):
        export.load(adapter, placed=True)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama3-8b", "qwen3_moe-30b-a3b"])
def test_the_check_of_an_export_reads_from_the_disk_what_the_host_does_not_hold(family, stored, tmp_path, monkeypatch):
    """Also experts, which the model has in another form than the files, and weights that are compared in fp32."""
    folder, tokens = tmp_path / "export", torch.arange(20)[None]
    draft.write(replace(pages.find(family, "full"), draft=Draft(enabled=True)), folder, stored)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(input_ids=tokens).logits.detach()
    load_whole, places = export.load_whole, []

    def loaded(*arguments, **options):
        model = load_whole(*arguments, **options)
        places.append(set(getattr(model, "hf_device_map", {}).values()))
        return model

    def difference():
        return export._differences(folder, torch.float32, {"input_ids": tokens}, logits).max()

    monkeypatch.setattr(export, "load_whole", loaded)
    assert difference() < 1e-5
    monkeypatch.setattr(export, "free_memory", lambda: 4 * model.num_parameters())
    assert difference() < 1e-5
    assert places == [set(), {"cpu", "disk"}]
    change(folder, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].zero_())
    assert difference() > 1e-3


def test_a_model_is_split_where_one_gpu_is_too_small_for_its_weights(whole, monkeypatch):
    size = (whole / "model.safetensors").stat().st_size
    assert export.device_map(whole) == {}, "on a CPU"
    monkeypatch.setattr(export.distributed, "device", lambda: torch.device("cuda:0"))
    for free, split in ((2 * size, {}), (size, {"device_map": "auto"})):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2 * free))
        assert export.device_map(whole) == split


IN_TEST = {"deepseek", "falcon_h1", "gemma3", "glm4_5", "gpt2", "llama3", "qwen3_moe"}
"""Attention of three kinds, a state space, experts, and matrices that are stored transposed."""


@pytest.mark.parametrize("family", tiered(pages.families(), IN_TEST))
def test_every_form_of_every_familys_export_agrees(family, tmp_path):
    """Of a draft: all weights, adapters (on experts where the page has them), both merged; a layer that is lost."""
    base, folder, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    recipe = pages.find(f"{family}-{next(iter(pages.page(family).SIZES))}", "lora")
    draft.write(replace(recipe, draft=Draft(enabled=True)), base, torch.float32)
    model, reader = export.load(base).eval(), export.load_processor(base)
    tokenizer = export.load_tokenizer(base)
    examples, plain, _ = answers(model, tokenizer)
    expected.write(base, examples, model.dtype, plain)
    assert certificate.of_folder(base).difference < 1e-4
    adapted = load.adapted(model, recipe).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(folder)
    reader.save_pretrained(folder)
    expected.write(folder, examples, model.dtype, answers(adapted, tokenizer)[1], plain)
    export.write(folder, merged, merge=True)
    for one in (folder, merged):
        found = certificate.of_folder(one)
        assert found.agrees and found.difference < 1e-3, (one, str(found), found.causes)
    assert certificate.compare(certificate.read(folder), plain, folder).like_base
    layer = max(name for name in load_file(folder / ADAPTER) if "lora_B" in name)
    change(folder, lambda tensors: tensors[layer].zero_())
    assert layer in certificate.of_folder(folder).causes[0]


MIXTURES = [
    family
    for family in pages.families()
    if any(getattr(next(iter(pages.page(family).SIZES.values())), "config", {}).get(name) for name in EXPERT_COUNTS)
]


def test_all_families_with_experts_are_merged_in_16_bits():
    named = "deepseek glm4_5 gpt_oss minimax_m2 mixtral nemotron_h olmoe qwen3_5_moe qwen3_moe"
    assert " ".join(MIXTURES) == named


@pytest.mark.parametrize("seed", tiered(range(3), {0}))
@pytest.mark.parametrize("family", tiered(MIXTURES, {"mixtral"}))
def test_an_moe_model_merged_in_16_bits_agrees_and_a_fault_does_not(family, seed, tmp_path):
    """Merging rounds the weights, so that some tokens go to other experts: `expected.BOUNDS` has what that changes."""
    recipe = pages.find(f"{family}-{next(iter(pages.page(family).SIZES))}", "lora")
    draft.write(replace(recipe, draft=Draft(enabled=True)), base := tmp_path / "base", torch.bfloat16)
    tokenizer = export.load_tokenizer(base)

    def adapted(of_base=lambda name, weight: None, of_adapter=lambda weight: None):
        model = export.load(base).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                of_base(name, weight)
            model = lora.add(model, recipe.lora, 0, scores=False, embeds=False, excluded=None).eval()
            generator = torch.Generator().manual_seed(seed)
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    of_adapter(weight.copy_(0.05 * torch.randn(weight.shape, generator=generator)))
        return model

    model = adapted()
    model.save_pretrained(folder := tmp_path / "adapter")
    tokenizer.save_pretrained(folder)
    examples, right, plain = answers(model, tokenizer, export.load(base).eval())
    expected.write(folder, examples, torch.bfloat16, right, plain)
    export.write(folder, merged := tmp_path / "merged", merge=True)
    found = certificate.of_folder(merged)
    assert found.agrees and found.routed and found.bound == 0.06, (str(found), found.causes)
    rank = recipe.lora.rank
    for name, changes in {
        "left out": {"of_adapter": lambda weight: weight.zero_()},
        "transposed": {"of_adapter": lambda weight: weight.copy_(weight.T.clone().reshape(weight.shape))},
        "scaled by the rank": {"of_adapter": lambda weight: weight.mul_(rank)},
        "merged twice": {"of_adapter": lambda weight: weight.mul_(2)},
        "another base": {"of_base": lambda name, weight: "norm" in name and weight.mul_(1.5)},
    }.items():
        wrong = answers(adapted(**changes).merge_and_unload(), tokenizer)[1]
        other = certificate.compare(certificate.read(merged), wrong, merged, read_tensors=False)
        assert not other.agrees and other.difference > 2 * other.bound, (name, str(other))


def test_a_merged_copy_agrees(adapter, tmp_path):
    export.write(adapter, tmp_path / "merged", merge=True)
    found = certificate.of_folder(tmp_path / "merged")
    assert found.agrees and found.difference < 1e-3, (str(found), found.causes)


@pytest.mark.every
@pytest.mark.skipif(not environment.has_llama_cpp(), reason="needs `make gguf`")
def test_llama_cpp_agrees_and_takes_no_adapter(whole, adapter, tmp_path):
    """Also of Qwen3.5, whose converter expects a head for further tokens that the draft has not."""
    export.write(adapter, tmp_path / "merged", merge=True)
    draft.write(
        replace(pages.find("qwen3_5-0.8b", "full"), draft=Draft(enabled=True)), tmp_path / "qwen", torch.float32
    )
    model, tokenizer = trained(tmp_path / "qwen")
    examples, found, _ = answers(model, tokenizer)
    expected.write(tmp_path / "qwen", examples, model.dtype, found)
    for folder in (whole, tmp_path / "merged", tmp_path / "qwen"):
        found = certificate.of_llama_cpp(folder)
        assert found.agrees and found.difference < 1e-3, (str(found), found.causes)
    change(copied(whole, tmp_path), lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].zero_())
    assert not certificate.of_llama_cpp(tmp_path / "copy").agrees
    assert run_command("certify", [str(adapter), "--server", "llama.cpp"]) == 2


@pytest.mark.every
@pytest.mark.skipif(not environment.has_llama_cpp(), reason="needs `make gguf`")
@pytest.mark.parametrize("rounds", [False, True])
def test_llama_cpp_rounds_the_range_of_yarn(rounds, tmp_path):
    """GPT-OSS's is not rounded. `certificate.ROUNDED` can go once llama.cpp agrees with such a model."""
    recipe = pages.find("gpt_oss-20b", "full")
    draft.write(replace(recipe, draft=Draft(enabled=True, hidden_size=128)), tmp_path, torch.float32)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert rope["truncate"] is False
    edit(tmp_path, "config.json", rope_parameters=rope | {"truncate": rounds})
    model, tokenizer = trained(tmp_path)
    examples, measured, _ = answers(model, tokenizer)
    expected.write(tmp_path, examples, model.dtype, measured)
    found = certificate.of_llama_cpp(tmp_path)
    assert (found.agrees, found.causes) == ((True, ()) if rounds else (False, (certificate.ROUNDED,))), str(found)


def transposed(tensors):
    for name in [name for name in tensors if "q_proj.lora_B" in name]:
        tensors[name] = tensors[name].reshape(tensors[name].shape[::-1]).T.contiguous()


def swapped(tensors):
    for kind in ("mlp.down_proj.weight",):
        one, other = f"model.layers.1.{kind}", f"model.layers.2.{kind}"
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


WHOLE = {
    "a tensor zeroed": (lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].zero_(), "up_proj"),
    "a tensor missing": (
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
        "the folder lacks model.lay",
    ),
    "a tensor of another layer": (swapped, "has other values of model.layers.1.mlp.down_proj.weight and 1 more"),
    "a tied head written untied": (
        lambda tensors: tensors.update({"lm_head.weight": torch.randn_like(tensors["model.embed_tokens.weight"])}),
        "has, and was not trained with lm_head.weight",
    ),
}
ADAPTERS = {
    "transposed": (transposed, "q_proj"),
    "zeroed": (lambda tensors: [tensor.zero_() for name, tensor in tensors.items() if "lora_B" in name], "lora_B"),
    "merged twice": (
        lambda tensors: [tensor.mul_(2) for name, tensor in tensors.items() if "lora_B" in name],
        "lora_B",
    ),
}


@pytest.mark.parametrize("fault", WHOLE)
def test_a_fault_in_a_whole_model_is_found(whole, tmp_path, fault, capsys):
    wrong, cause = WHOLE[fault]
    change(folder := copied(whole, tmp_path), wrong)
    assert certify.main([str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS" in shown and cause in shown, shown


@pytest.mark.parametrize("fault", ADAPTERS)
def test_a_fault_in_an_adapter_is_found(adapter, tmp_path, fault, capsys):
    wrong, cause = ADAPTERS[fault]
    change(folder := copied(adapter, tmp_path), wrong)
    assert certify.main([str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS" in shown and cause in shown, shown
    assert ("its answers are the base model's" in shown) == (fault == "zeroed")


def test_an_adapter_without_a_tensor_is_refused(adapter, tmp_path):
    change(folder := copied(adapter, tmp_path), lambda tensors: tensors.pop(next(iter(tensors))))
    with pytest.raises(UserError, match=rf"{folder}: adapter_config.json names layers .* file lacks \(1, such as"):
        certify.main([str(folder)])


@pytest.mark.parametrize(
    ("kind", "name", "values", "cause"),
    [
        ("adapter", "adapter_config.json", {"lora_alpha": 4}, "adapter_config.json: lora_alpha is 4, and was 16"),
        ("adapter", "adapter_config.json", {"use_rslora": True}, "use_rslora is True"),
        ("whole", "config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, "rope_parameters"),
        ("whole", "config.json", {"dtype": "bfloat16"}, "config.json: dtype is bfloat16, and was float32"),
        ("whole", "config.json", {"max_position_embeddings": 64}, "max_position_embeddings is 64"),
        ("whole", "tokenizer.json", {"decoder": None}, "tokenizer.json differs"),
        ("whole", "generation_config.json", {"eos_token_id": 5}, "eos_token_id is 5"),
        ("whole", "generation_config.json", {"suppress_tokens": [5]}, "suppress_tokens is [5], and was None"),
        ("adapter", "generation_config.json", {"repetition_penalty": 1.3}, "repetition_penalty is 1.3, and was None"),
    ],
)
def test_other_settings_are_found(kind, name, values, cause, request, tmp_path, capsys):
    edit(folder := copied(request.getfixturevalue(kind), tmp_path), name, **values)
    assert certify.main([str(folder)]) == 1
    assert cause in capsys.readouterr().out


def test_another_tokenizer_is_found_and_the_same_end_in_a_list_is_none(whole, tmp_path, capsys):
    folder = copied(whole, tmp_path)
    end = read_json(folder / "generation_config.json")["eos_token_id"]
    edit(folder, "generation_config.json", eos_token_id=[end])
    edit(folder, "tokenizer.json", truncation={"max_length": 9, "strategy": "LongestFirst", "stride": 0})
    assert certify.main([str(folder)]) == 0
    model = read_json(folder / "tokenizer.json")["model"]
    ids = list(model["vocab"].values())
    words = dict(zip(model["vocab"], [*ids[:300], *ids[:299:-1]], strict=True))
    edit(folder, "tokenizer.json", model=model | {"vocab": words})
    assert certify.main([str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "500 of 500 likeliest" in shown and "the tokenizer makes other tokens of 'The capital" in shown, shown


def test_a_quantised_layer_of_another_group_size_is_found(whole, tmp_path):
    """Its answers would differ by less than the bound of a quantised copy."""
    folder = copied(whole, tmp_path)
    groups = [{"group_0": {"weights": {"num_bits": 4, "group_size": size}}} for size in (128, 32)]
    for number, one in enumerate(groups):
        edit(folder, "config.json", quantization_config={"quant_method": "compressed-tensors", "config_groups": one})
        if number == 0:
            expected.copy(whole, folder)
            assert certificate.compare(certificate.read(folder), certificate.read(folder)["texts"], folder).agrees
    found = certificate.compare(certificate.read(folder), certificate.read(folder)["texts"], folder)
    assert not found.agrees and "quantization_config" in found.causes[0] and "'group_size': 32" in found.causes[0]


def test_another_template_is_found(whole, tmp_path, capsys):
    folder = copied(whole, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert certify.main([str(folder)]) == 1
    assert "chat_template.jinja differs" in capsys.readouterr().out


def test_another_base_is_found(adapter, tmp_path, capsys):
    folder, base = copied(adapter, tmp_path), tmp_path / "base"
    shutil.copytree(TINY_MODEL, base)
    change(base, lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    edit(folder, "adapter_config.json", base_model_name_or_path=str(base))
    assert certify.main([str(folder)]) == 1
    said = capsys.readouterr()
    assert "the adapter's base model differs" in said.out and "has other weights than the model" in said.err


def test_an_adapter_on_another_base_is_warned_of_wherever_it_is_loaded(adapter, tmp_path, capsys):
    """Another adapter that was merged into the base changes no norms: one row of each matrix is compared, too."""
    base = tmp_path / "base"
    shutil.copytree(base_model.find(adapter), base)
    export.load(base, adapter=adapter)
    assert not capsys.readouterr().err
    change(base, lambda tensors: tensors["model.layers.0.self_attn.q_proj.weight"].add_(1e-3))
    export.load(base, adapter=adapter)
    assert f"warning: {base} has other weights than the model that {adapter} was trained on" in capsys.readouterr().err
    folder = copied(adapter, tmp_path)  # of an earlier version
    edit(folder, "expected.json", base="0123456789abcdef")
    export.load(base, adapter=folder)
    assert not capsys.readouterr().err and not [*certificate.causes(certificate.read(folder), folder)]


def test_a_server_that_leaves_an_adapter_out_is_found(adapter):
    wanted = certificate.read(adapter)
    model, _ = trained(Path(TINY_MODEL))
    base = expected.measured(lambda tokens: model(input_ids=tokens).logits, wanted["texts"])
    found = certificate.compare(wanted, base, adapter)
    assert found.like_base and not found.agrees and not found.causes


@pytest.mark.parametrize("padding", ["end", "start"])
def test_texts_answer_together_as_each_alone(monkeypatch, padding):
    model, tokenizer = trained(Path(TINY_MODEL))
    together = answers(model, tokenizer)[1]
    monkeypatch.setattr(expected, "TOGETHER", 1)
    forward = model.forward
    if padding == "start":  # the mistake: what an answer follows is no longer its question
        monkeypatch.setattr(
            model, "forward", lambda input_ids: forward(input_ids=torch.nn.functional.pad(input_ids, (9, -9)))
        )
    alone = answers(model, tokenizer)[1]
    furthest = max(
        abs(one - other)
        for each, found in zip(alone, together, strict=True)
        for one, other in zip(each["logprobs"], found["logprobs"], strict=True)
    )
    assert (furthest < 1e-4) is (padding == "end")


def test_an_effect_below_the_bound_still_tells_the_base(adapter):
    wanted = certificate.read(adapter)
    for text in wanted["texts"]:
        text["base_logprobs"] = [value + 1e-4 for value in text["logprobs"]]
    base = [{"logprobs": text["base_logprobs"], "likeliest": text["likeliest"]} for text in wanted["texts"]]
    found = certificate.compare(wanted, base, adapter)
    assert found.difference < found.bound and found.like_base and not found.agrees


def test_tensors_are_read_only_where_answers_differ(whole, monkeypatch):
    wanted, read = certificate.read(whole), []
    monkeypatch.setattr(expected, "digests", lambda folder: read.append(folder) or wanted["tensors"])
    assert certificate.compare(wanted, wanted["texts"], whole, read_tensors=False).agrees and not read
    other = [{**text, "logprobs": [value - 1 for value in text["logprobs"]]} for text in wanted["texts"]]
    assert not certificate.compare(wanted, other, whole, read_tensors=False).agrees and read == [whole]


def test_answers_that_are_no_numbers_do_not_agree(whole):
    wanted = certificate.read(whole)
    nothing = [{**text, "logprobs": [float("nan")] * len(text["logprobs"])} for text in wanted["texts"]]
    assert not certificate.compare(wanted, nothing, whole).agrees


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([TINY_MODEL], "has no expected.json"),
        (["http://127.0.0.1:9"], "add --folder F"),
        (["http://127.0.0.1:9", "--folder", "WHOLE"], "no answer"),
        (["WHOLE", "--folder", "x"], "are for a server's address"),
        (["absent"], "absent"),
        (["WHOLE", "--adapter", "mine"], "write NAME=FOLDER"),
        (["WHOLE", "--adapter", "mine=WHOLE"], "has no adapter"),
        (["WHOLE", "--adapter", "mine=ADAPTER"], "--adapter mine: its base model is"),
        (["http://127.0.0.1:9", "--adapter", "mine=ADAPTER"], "no answer"),
        (["http://127.0.0.1:9", "--adapter", "mine=ADAPTER", "--model", "x"], "leave out --model and --folder"),
    ],
)
def test_what_cannot_be_compared_is_a_line(whole, adapter, words, message):
    with pytest.raises(UserError) as caught:
        certify.main([word.replace("WHOLE", str(whole)).replace("ADAPTER", str(adapter)) for word in words])
    assert message in str(caught.value) and "\n" not in str(caught.value)


ANSWERS = {
    "no log-probabilities of a prompt": {"choices": [{"text": "x"}]},
    "of a prompt": {"choices": [{"text": "x", "prompt_logprobs": None}]},
    "its log-probabilities are of other tokens": {"choices": [{"prompt_logprobs": [None, None]}]},
    "the answer broke off (KeyError": {"object": "list"},
    'the server answered an error: "busy"': {"error": "busy"},
    "the answer broke off (JSONDecodeError": "<html>",
    "AttributeError": {"choices": ["x"]},
    "the server answered 404: no model other": None,
    f"the server answered 401: no model other; set {client.KEY} to its key": None,
}


@pytest.mark.parametrize("message", ANSWERS)
def test_a_server_that_answers_something_else_is_a_line(whole, message, capsys, monkeypatch):
    monkeypatch.delenv(client.KEY, raising=False)
    asked: set[str | None] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            asked.add(self.headers["Authorization"])
            answer = ANSWERS[message]
            self.send_response(200 if answer else 404 if "404" in message else 401)
            self.end_headers()
            text = answer if isinstance(answer, str) else json.dumps(answer) if answer else "no model other"
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [f"http://ada:a%20b@127.0.0.1:{server.server_port}", "--folder", str(whole), "--model", "other"]
        assert run_command("certify", words[: -2 if "JSON" in message else None]) == 2
        server.shutdown()
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "a%20b" not in said, said
    assert asked == {f"Basic {base64.b64encode(b'ada:a b').decode()}"}


@pytest.mark.parametrize("busy", [2, 99])
def test_a_busy_server_is_asked_again(busy):
    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(429 if len(asked) % 2 else 503)
            self.send_response(asked[-1] if len(asked) <= busy else 200)
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode())

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = client.Server(f"http://127.0.0.1:{server.server_port}", "m")
        if busy < client.TRIES:
            assert str(client.answers(there, [[{"role": "user", "content": "?"}]], {})[0]) == "yes"
        else:
            with pytest.raises(UserError, match="the server answered 429"):
                client.answers(there, [[{"role": "user", "content": "?"}]], {})
        server.shutdown()
    assert len(asked) == min(busy + 1, client.TRIES)


@pytest.mark.parametrize("key", ["secret\nx", "sécret"])
def test_a_key_that_no_header_can_have_is_not_printed(key, whole, monkeypatch):
    monkeypatch.setenv(client.KEY, key)
    with pytest.raises(UserError, match=f"{client.KEY}: has characters that no header can have") as caught:
        certify.main(["http://127.0.0.1:9", "--folder", str(whole)])
    assert "cret" not in str(caught.value)


def test_another_version_is_refused(whole, tmp_path):
    edit(folder := copied(whole, tmp_path), base_model.EXPECTED, version=99)
    with pytest.raises(UserError, match="of another version"):
        certificate.read(folder)


def test_what_earlier_versions_did_not_write_is_no_difference(whole):
    wanted = certificate.read(whole)
    config = {name: value for name, value in wanted["config"].items() if name not in expected.ADDED}
    earlier = {name: value for name, value in wanted.items() if name != "tokenizer"} | {"config": config}
    assert certificate.compare(earlier, wanted["texts"], whole).agrees


def test_a_copy_is_described_anew(whole, tmp_path):
    folder = tmp_path / "new"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(base_model.EXPECTED))
    change(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))
    complete.of_copy(folder, whole, folder)
    found = certificate.of_folder(folder)
    assert not found.agrees and not found.causes  # its tensors are as written; its answers are not the trained model's


def test_the_certificate_is_written_into_the_card_and_not_into_a_copys(whole, tmp_path):
    folder, copy = copied(whole, tmp_path), tmp_path / "other"
    with pytest.raises(UserError, match="has no training/"):
        certify.main([str(folder), "--card"])
    record.write(folder, record.Record(pages.find("tiny-3m", "full"), {}), None)
    assert certify.main([str(folder), "--card"]) == 0
    row = "within 0 nats of the trained model's (bound 0.002) | 500 of 500 the same |"
    assert f"| transformers {version('transformers')} | {row}" in (folder / "README.md").read_text()
    export.write(folder, copy, merge=False)
    assert "## Certificate" not in (copy / "README.md").read_text()
    assert record.CERTIFICATES not in record.read(copy).results
    change(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))
    before = (folder / "README.md").read_text()
    assert certify.main([str(folder), "--card"]) == 1 and (folder / "README.md").read_text() == before


def test_a_server_asks_for_log_probabilities_and_its_own_template(whole, monkeypatch):
    wanted = certificate.read(whole)
    asked = {tuple(text["tokens"]): text for text in wanted["texts"]}
    monkeypatch.setattr(certificate.servers, "log_probabilities", lambda server, tokens, start: asked[tuple(tokens)])
    monkeypatch.setattr(certificate.servers, "prompt_tokens", lambda server, messages: 3)
    found = certificate.of_server(Server("http://x", "m"), whole)
    assert not found.agrees and "the server's chat template makes 3 tokens" in found.causes[0]
