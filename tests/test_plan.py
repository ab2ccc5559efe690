"""The planner's command line: its output, the files it writes, and its error messages."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import pytest

from deepspeed_recipes.commands import check, launch, main, plan
from deepspeed_recipes.commands.launch import plan as launch_plan
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.planning.hardware.cluster import cluster
from deepspeed_recipes.planning.search import forecast
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import TYPED
from deepspeed_recipes.recipe.run_folder import read_json
from tests import ROOT
from tests.network_hosts import needs_pdsh
from tests.versions import needs

EIGHT = ("--gpu", "H100", "--gpus", "8")
KEYS = {
    "config",
    "layout",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "gpu_peak_gib",
    "gpu_breakdown_gib",
    "host_gib",
    "nvme_gib",
    "tokens_per_second_per_gpu",
    "step_seconds",
    "fits",
    "why",
}


SIZE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.fixture
def config_json(tmp_path):
    """Return a function that writes a model's config.json and gives its path."""

    def write(**changes):
        config = dict(pages.page("llama3").SIZES["8b"].config) | {"architectures": ["LlamaForCausalLM"]} | changes
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
        return str(path)

    return write


def test_the_json_is_what_the_contract_says(answer):
    found = answer("llama3-8b", *EIGHT, "--host-memory", "1000")
    assert {"model", "hardware", "plans", "best"} == found.keys() and found["best"] == 0
    assert found["model"]["parameters"] == 8_030_261_248 and found["model"]["method"] == "full"
    assert (found["hardware"]["gpus_per_node"], found["hardware"]["nodes"]) == (8, 1)
    for one in found["plans"]:
        assert one.keys() >= KEYS
        assert one["layout"].keys() == {"data", "tensor", "pipeline", "sequence", "expert"}
        assert (ROOT / "configs" / one["config"]).exists()
        # fp32 weights and Adam's moments, the weights twice in bf16, and a tenth: what the trainer wants to be free.
        assert one["checkpoint_gib"] == pytest.approx(1.1 * (12 + 4) * 8_030_261_248 / 2**30, rel=0.001)
        assert sum(one["gpu_breakdown_gib"].values()) == pytest.approx(one["gpu_peak_gib"])
        low, high = one["gpu_peak_gib_range"]
        slow, fast = one["tokens_per_second_per_gpu_range"]
        assert low <= one["gpu_peak_gib"] <= high and slow <= one["tokens_per_second_per_gpu"] <= fast and low < high
        assert one["fits"] == (one["gpu_peak_gib"] <= 0.95 * found["hardware"]["gpu_memory_gib"])
        batch = one["layout"]["data"] * one["micro_batch_size"] * one["gradient_accumulation_steps"]
        assert batch == found["model"]["global_batch_size"] == 64
        tokens = batch * found["model"]["sequence_length"] / 8
        assert one["tokens_per_second_per_gpu"] * one["step_seconds"] == pytest.approx(tokens)
        assert one["why"].endswith(".") and "\n" not in one["why"]
    fits = [one["fits"] for one in found["plans"]]
    assert fits == sorted(fits, reverse=True), "what does not fit comes last"


def test_a_plan_that_waits_for_its_host_says_so(capsys):
    few = ("micro_batch_size=1", "sequence_length=256", "packing=false")
    for words, waits in ((few, True), ((), False)):
        plan.main(["qwen3-0.6b", "--method", "lora", "--gpu", "H100", *words])
        shown = " ".join(capsys.readouterr().out.split())
        assert ("of a step: a slow CPU can double the time" in shown) == waits


def test_the_table_names_the_best_first_and_its_command(printed_by):
    shown = printed_by("plan", "llama3-8b", *EIGHT, "--explain")
    assert shown.startswith("llama3-8b (meta-llama/Llama-3.1-8B-Instruct, 8.03B), full, 64 sequences of 4,096 tokens")
    command = shown.strip().splitlines()[-1]
    assert command.startswith("python scripts/launch.py llama3-8b full --gpus 8")
    assert "does not fit" in shown and "free" in shown and "Each checkpoint takes 132 GiB" in shown
    assert launch.main([*command.split()[2:], "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (["llama3-8b", *EIGHT], {}),
        (["llama3-70b", "--method", "lora", *EIGHT], {}),
        pytest.param(
            ["llama3-70b", *EIGHT, "--nodes", "8", "deepspeed=pipeline.json", "layout.pipeline=4", "layout.sequence=1"],
            {"pipeline": 4},
            marks=needs_pdsh,
        ),
        pytest.param(["llama3-8b", *EIGHT, "--nodes", "2", "deepspeed=zero3_hpz.json"], {}, marks=needs_pdsh),
        (["qwen3-8b", *EIGHT, "layout.tensor=4"], {}),
        pytest.param(["mixtral-8x7b", *EIGHT, "--nodes", "8", "layout.expert=8"], {}, marks=needs_pdsh),
        (["llama3-8b", *EIGHT, "layout.sequence=8", "--sequence-length", "65536"], {"sequence-parallel": 8}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_written_loads_lints_and_launches(tmp_path, capsys, words, layout):
    assert plan.main([*words, "--write", str(tmp_path)]) == 0, capsys.readouterr().err
    file = tmp_path / "deepspeed.json"
    ranks = 8 * int(words[words.index("--nodes") + 1]) if "--nodes" in words else 8
    facts = [f"--{name}={size}" for name, size in {"world-size": ranks, **layout}.items()]
    assert check.main([str(file), *facts, "--trainer", "plain"]) == 0, capsys.readouterr().out
    config = read_json(file)
    assert '"auto"' not in file.read_text()
    command = started(tmp_path)
    assert ("--hostfile" in command) == ("--nodes" in words)
    assert launch.main([*command, "--dry-run", "full"]) == 0, capsys.readouterr().err
    # Every rank reads the template, and the same batch comes of it.
    recipe, _ = json.JSONDecoder().raw_decode(shown := capsys.readouterr().out, shown.index("\n{\n") + 1)
    assert recipe["micro_batch_size"] == config["train_micro_batch_size_per_gpu"]
    assert Path(recipe["deepspeed"]).exists()


@pytest.mark.parametrize("name", ["launch.sh", "deepspeed.json"])
def test_a_plan_replaces_only_what_a_plan_has_written(tmp_path, name, capsys):
    (tmp_path / name).write_text("precious")
    with pytest.raises(UserError, match=f"has a {name} that no plan has written"):
        plan.main(["qwen3-0.6b", *EIGHT, "--write", str(tmp_path)])
    assert [file.read_text() for file in tmp_path.iterdir()] == ["precious"]
    (tmp_path / name).unlink()
    for _ in range(2):
        assert plan.main(["qwen3-0.6b", *EIGHT, "--write", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("model", "prefetched", "reduced"),
    [
        ("qwen3-0.6b", 15_730_944, 15_730_944),
        ("llama3-8b", 5 * 10**7, 5 * 10**7),
        ("llama3-70b", 0.9 * 8192**2, 5 * 10**7),
    ],
)
def test_message_sizes_follow_from_the_layers(tmp_path, model, prefetched, reduced):
    """A layer's weights, up to what hides the latency, and what transformers fills in for wide models."""
    words = [model, *EIGHT, "--nodes", "4", "deepspeed=zero3.json", "layout.tensor=1", "layout.pipeline=1"]
    assert plan.main([*words, "--write", str(tmp_path)]) == 0
    zero = read_json(tmp_path / "deepspeed.json")["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == pytest.approx(prefetched, rel=1e-6)
    assert zero["reduce_bucket_size"] == reduced


def test_message_sizes_of_a_users_file_stay_as_they_are(tmp_path):
    content = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 10**9, "stage3_prefetch_bucket_size": 7}}
    file = tmp_path / "own.json"
    file.write_text(json.dumps(content | {"train_micro_batch_size_per_gpu": "auto"}))
    assert plan.main(["qwen3-0.6b", *EIGHT, f"deepspeed={file}", "--write", str(tmp_path / "plan")]) == 0
    zero = read_json(tmp_path / "plan" / "deepspeed.json")["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (10**9, 7)


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ({"fp16": {"enabled": True}}, (), "fp16.enabled = true: the recipe has precision=bf16"),
        ({"gradient_clipping": 0.3}, (), "gradient_clipping = 0.3: the recipe has max_grad_norm=1"),
        ({"zero_optimization": {"stage": "2"}}, (), 'zero_optimization.stage = "2": DeepSpeed reads 2'),
        ({"train_micro_batch_size_per_gpu": 4}, ("micro_batch_size=2",), "the recipe has micro_batch_size=2"),
        ({"train_micro_batch_size_per_gpu": 2}, ("micro_batch_size=2",), None),
        ({"gradient_clipping": 0.3}, ("max_grad_norm=0.3",), None),
        ({"gradient_accumulation_steps": 3}, (), "the recipe has global_batch_size="),  # the planner chooses another
    ],
)
def test_a_file_that_contradicts_the_recipe_is_refused_as_by_the_launcher(tmp_path, capsys, content, words, said):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"} | content))
    assert main.run("plan", ["qwen3-0.6b", *EIGHT, f"deepspeed={file}", *words]) == (2 if said else 0)
    assert (said or "") in capsys.readouterr().err


def started(folder):
    """Return the words that launch.sh gives to the launcher, for hosts a, b, ... of as many slots as it wants."""
    script = (folder / "launch.sh").read_text()
    hosts = folder / "hosts"
    hosts.write_text("".join(f"host{number} slots=8\n" for number in range(8)))
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$SEEN"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "SEEN": str(folder / "seen")}
    given = ["hosts"] if "--hostfile" in script else []
    subprocess.run([folder / "launch.sh", *given, "epochs=2"], env=environment, cwd=folder, check=True)
    name, *words = (folder / "seen").read_text().splitlines()
    assert name == "scripts/launch.py" and words[-1] == "epochs=2"
    return words


def test_launch_sh_asks_for_the_hostfile(tmp_path):
    assert plan.main(["llama3-8b", *EIGHT, "--nodes", "2", "--write", str(tmp_path)]) == 0
    done = subprocess.run([tmp_path / "launch.sh"], capture_output=True, text=True)
    assert done.returncode != 0 and "hostfile: a line HOST slots=N per node" in done.stderr


def test_hpz_is_written_for_the_nodes_there_are(tmp_path):
    words = ["llama3-8b", "--gpu", "H100", "--gpus", "4", "--nodes", "2", "deepspeed=zero3_hpz.json"]
    assert plan.main([*words, "--write", str(tmp_path)]) == 0
    for name in ("deepspeed.json", "zero3_hpz.json"):
        assert read_json(tmp_path / name)["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert f"deepspeed={tmp_path / 'zero3_hpz.json'}" in started(tmp_path)


@pytest.mark.parametrize(("gpu", "precision"), [("T4", "fp16"), ("V100-32GB", "fp16"), ("A10G", "bf16")])
def test_what_is_written_is_in_a_precision_that_the_gpu_has(tmp_path, capsys, gpu, precision):
    assert plan.main(["llama3-1b", "--method", "lora", "--gpu", gpu, "--write", str(tmp_path)]) == 0
    written = read_json(tmp_path / "deepspeed.json")
    assert (written["fp16"]["enabled"], written["bf16"]["enabled"]) == (precision == "fp16", precision == "bf16")
    assert ("precision=fp16" in (tmp_path / "launch.sh").read_text()) == (precision == "fp16")
    assert ("has no bf16" in capsys.readouterr().out) == (precision == "fp16")


def test_a_gpu_of_which_only_the_memory_is_given_has_no_others_name(answer, capsys):
    assert answer("llama3-1b", "--gpu-memory", "8")["hardware"]["gpu"] == "GPU with 8 GiB"
    assert plan.main(["llama3-1b", "--method", "qlora", "--gpu-memory", "8"]) == 0
    assert "1 x GPU with 8 GiB (assumed to be as fast as RTX 4060)" in capsys.readouterr().out


def test_fixed_settings_are_kept(answer):
    asked = ["deepspeed=zero3.json", "layout.tensor=2", "micro_batch_size=2", "gradient_checkpointing=true"]
    found = answer("llama3-8b", *EIGHT, *asked, "global_batch_size=128")
    [one] = found["plans"]
    assert one["config"] == "zero3.json" and one["layout"] | {"data": 4, "tensor": 2} == one["layout"]
    assert one["micro_batch_size"] == 2 and one["gradient_checkpointing"]
    assert found["model"]["global_batch_size"] == 128


def test_a_model_of_ones_own_borrows_a_recipe_and_is_told_so(config_json, printed_by):
    said = printed_by("plan", config_json(), *EIGHT)
    assert "Data, rates and batch are from llama3-8b, the nearest recipe" in said
    assert "Other methods" not in said  # which takes seconds for a model that is not profiled yet


def test_a_config_json_is_as_good_as_a_recipe(answer, config_json):
    page, own = answer("llama3-8b", *EIGHT), answer(config_json(), *EIGHT)
    assert own["model"]["parameters"] == page["model"]["parameters"]
    keep = ("config", "layout", "micro_batch_size", "gpu_peak_gib", "tokens_per_second_per_gpu")
    assert [[one[key] for key in keep] for one in own["plans"]] == [[one[key] for key in keep] for one in page["plans"]]
    assert f"model.path={config_json().removesuffix('/config.json')}" in own["plans"][0]["command"]
    folder = answer(config_json().removesuffix("config.json"), *EIGHT)
    assert folder["plans"] == own["plans"]


def test_a_slow_network_slows_what_crosses_it(answer):
    two = ["llama3-8b", *EIGHT, "--nodes", "2", "deepspeed=zero3.json", "micro_batch_size=1"]
    fast, slow = answer(*two), answer(*two, "--network", "10")
    assert "llama3-8b full --hostfile HOSTS --nodes 2 --gpus 8" in fast["plans"][0]["command"]
    assert (fast["hardware"]["network_gbs"], slow["hardware"]["network_gbs"]) == (400, 1.25)
    assert slow["plans"][0]["tokens_per_second_per_gpu"] < 0.7 * fast["plans"][0]["tokens_per_second_per_gpu"]


def test_a_hub_id_that_has_a_page_needs_no_network(answer):
    assert answer("meta-llama/Llama-3.1-8B-Instruct", *EIGHT)["model"]["recipe"] == "llama3-8b"


MISTAKES = {
    (
        "lama3-8b",
        *EIGHT,
    ): "lama3-8b: not a recipe, Hub id (OWNER/NAME) or path to a config.json; did you mean llama3-8b",
    ("llama3-9b", *EIGHT): "unknown size of llama3 '9b'; did you mean '8b'",
    ("nobody/nothing", *EIGHT): "Without a network, copy that one small file here and give its path",
    ("no body/nothing", *EIGHT): "cannot read its config.json (Repo id must use alphanumeric chars",
    ("no/such/config.json", *EIGHT): "no/such/config.json: no such file",
    ("./nowhere/", *EIGHT): "./nowhere/: no such file or folder; name a config.json",
    ("llama3-8b", "--gpu", "H900"): "--gpu H900: unknown; did you mean",
    (
        "llama3-8b",
        "--gpu",
        "3090, 4060",
    ): "all wait for the slowest and hold as much as the smallest: --gpu RTX-4060 --",
    ("llama3-1b", "--gpu", "T4", "precision=bf16"): "precision=bf16: T4 has no bf16; write precision=fp16",
    ("llama3-8b", "--gpu", "H100", "--gpu-memory", "80"): "--gpu H100 --gpu-memory 80: give one of them",
    ("llama3-8b", "--gpu", "H100", "--gpus", "0"): "--gpus 0: must be above 0",
    ("llama3-8b", "--gpu", "H100", "--gpus", "512"): "write, for instance, --gpus 8 --nodes 64",
    ("llama3-8b", "--gpu", "H100", "--nodes", "-1"): "--nodes -1: must be above 0",
    ("llama3-8b", "--gpu-memory", "-3"): "--gpu-memory -3: must be above 0",
    ("llama3-8b", *EIGHT, "--host-memory", "-3"): "--host-memory -3: must be at least 0",
    ("llama3-8b", *EIGHT, "--network", "0"): "--network 0: must be above 0",
    ("llama3-8b", *EIGHT, "--method", "qlorra"): "unknown variant of llama3 'qlorra'; did you mean 'qlora'",
    ("mixtral-8x7b", *EIGHT, "--method", "qlora"): "mixtral has no qlora: transformers keeps all experts",
    ("llama3-8b", *EIGHT, "--sequence-length", "0"): "sequence_length=0: must be at least 8",
    ("llama3-8b", *EIGHT, "--sequence-length", "200000"): "the model has 131,072 positions",
    ("llama3-8b", *EIGHT, "--sequence-length", "4", "sequence_length=4"): "give one of them",
    ("llama3-8b", *EIGHT, "model.path=x"): "give the model as the first word",
    ("llama3-8b", *EIGHT, "layout.tensr=2"): "unknown key 'layout.tensr'. Did you mean 'layout.tensor'",
    ("llama3-8b", *EIGHT, "layout.tensor=3"): "layout.tensor=3: 8 ranks are not divisible by 3",
    ("llama3-8b", *EIGHT, "layout.expert=8"): "layout.expert=8: llama has no experts",
    ("llama3-8b", *EIGHT, "deepspeed=zero3.json", "layout.pipeline=4"): "pipeline supports ZeRO 0 and 1 only",
    (
        "llama3-8b",
        *EIGHT,
        "lora.rank=8",
    ): "--method full: your key=value settings change the method to lora; write --method lora",
    ("llama3-8b", "lora", *EIGHT, "--method", "qlora"): "lora and qlora: name one variant",
    ("llama3-8b", "lora", *EIGHT, "lorra"): "lora and lorra: name one variant; settings are written key=value",
    ("llama3-8b", *EIGHT, "--write", "/etc/passwd"): "--write /etc/passwd: cannot be written",
    ("llama3-8b", "--gpu-memory", "nan"): "--gpu-memory nan: must be above 0",
    ("llama3-8b", *EIGHT, "--host-memory", "inf"): "--host-memory inf: must be at least 0",
    ("llama3-8b", *EIGHT, "deepspeed=zero9.json"): "deepspeed=zero9.json: no such file; did you mean zero",
}


def test_a_config_of_another_name_is_not_mistaken_for_its_folders(tmp_path, config_json, refusal):
    other = tmp_path / "other.json"
    other.write_text(Path(config_json()).read_text())
    assert "other.json: a model is a folder with a config.json" in refusal("plan", other, *EIGHT)


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words))
def test_a_mistake_is_answered_in_a_line_or_two(words, refusal, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refusal("plan", *words)
    assert MISTAKES[words] in said and said.startswith("plan.py: ") and len(said.strip().splitlines()) <= 2, said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM is not a decoder"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": ...}, "has no model_type"),
        ({"model_type": "lllama", "architectures": ...}, "lllama"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number of at least 1"),
        ({"hidden_size": 4097, "head_dim": ...}, "hidden_size=4097 is not a multiple of num_attention_heads=32"),
        ({"vocab_size": "many"}, "vocab_size='many': must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers=100000: exceeds the maximum of 2,000"),
        ({"intermediate_size": -5}, "intermediate_size=-5: must be a whole number"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1: must be a whole number"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        ({"pad_token_id": 10**6}, "transformers cannot build this decoder: Padding_idx must be within"),
        pytest.param({"head_dim": 63}, "RoPE requires an even rotary dimension", marks=needs("transformers>=5.20")),
        ({"hidden_size": None}, "Field 'hidden_size' expected int"),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "num_attention_heads": ...},
            "mamba: has no attention",
        ),
        ({"model_type": "bert", "architectures": ...}, "BertLMHeadModel is not a decoder of the usual shape"),
        ({"model_type": "foo", "architectures": ...}, "foo: not a decoder of transformers"),
        (dict.fromkeys(SIZE_KEYS, ...), "has none of hidden_size, num_hidden_layers, num_attention_heads, vocab_size"),
        ({"model_type": "vit", "architectures": ...}, "vit: transformers cannot build this decoder"),
        ({"model_type": "clip", "architectures": ["CLIPModel"], "text_config": {"a": 1}}, "CLIPModel is not a decoder"),
        ({"text_config": {"hidden_size": 64}}, "its text_config has no model_type"),
        ({"text_config": [1]}, "its text_config has no model_type"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 9},
            "mixtral: its sizes contradict each other",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_a_decoders_is_refused(config_json, refusal, changes, said):
    error = refusal("plan", config_json(**changes), *EIGHT)
    assert said in error and len(error.strip().splitlines()) <= 2, error


def test_contradictions_are_reported_for_the_settings_given(capsys):
    given = ["deepspeed=expert_parallel.json", "layout.tensor=2"]
    assert plan.main(["llama3-8b", *EIGHT, *given]) == 1
    assert f"plan.py: {' '.join(given)}: this model cannot train like this on 8 GPUs" in capsys.readouterr().err


def test_auto_is_what_the_planner_does_anyway(answer):
    assert answer("llama3-8b", *EIGHT, "deepspeed=auto") == answer("llama3-8b", *EIGHT)


def test_a_file_that_is_not_a_config_is_refused(tmp_path, refusal):
    for text, said in (("{", "not JSON"), ("[]", "not a Hugging Face config.json")):
        (tmp_path / "config.json").write_text(text)
        assert said in refusal("plan", tmp_path, *EIGHT)


def test_without_a_network_there_are_no_six_retries(refusal, monkeypatch):
    def nowhere(*_, **__):
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", nowhere)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("this asks six times"))
    said = refusal("plan", "nobody/nothing", *EIGHT)
    assert "cannot read its config.json ([Errno -2] Name or service not known)" in said
    assert len(said.strip().splitlines()) == 2


def test_a_machine_without_gpus_is_told_what_to_give(refusal):
    assert "This machine has no GPU: give --gpu NAME or --gpu-memory GIB" in refusal("plan", "llama3-8b")


def test_where_nothing_fits_the_answer_says_what_would(capsys):
    assert plan.main(["llama3-8b", "--gpu", "RTX 4090", "--host-memory", "32"]) == 1
    shown = capsys.readouterr()
    assert "does not fit" in shown.out and "python scripts/launch.py" not in shown.out
    assert shown.err.startswith("plan.py: nothing fits; ") and "What would fit: --method lora" in shown.err
    assert len(shown.err.strip().splitlines()) == 2


def test_a_recipe_costs_no_import_of_torch():
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\nfrom deepspeed_recipes.commands import plan\n"
    code += f"assert plan.main(['llama3-8b', *{EIGHT!r}, '--json']) == 0\n"
    code += "assert not {'torch', 'transformers', 'deepspeed', 'matplotlib'} & set(sys.modules), 'heavy imports'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def without_the_stack(tmp_path):
    """Return a function that runs ds-recipes plan where only the standard library and rich can be imported."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ("rich", "pygments", "markdown_it", "mdurl"):
        (site / name).symlink_to(Path(find_spec(name).origin).parent)
    code = f"import sys; sys.path[:0] = [{str(ROOT / 'src')!r}, {str(site)!r}]\n"
    code += "from deepspeed_recipes.commands import main\n"
    code += "sys.exit(main.run('plan'))"

    def run(*words):
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), TYPED: str(ROOT)}
        command = [sys.executable, "-I", "-S", "-c", code, *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_the_planner_works_without_the_training_stack(without_the_stack, answer):
    done = without_the_stack("llama3-8b", *EIGHT, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answer("llama3-8b", *EIGHT)
    for name in ("gpt2-124m", "deepseek-v2-lite", "gpt_oss-20b", "bloom-7b1"):
        assert without_the_stack(name, *EIGHT, "--method", "lora").returncode == 0


def test_what_needs_the_training_stack_is_answered_with_how_to_install_it(without_the_stack, config_json):
    # A model without a stored profile is built by transformers, which this checkout's own environment has.
    activate, install = "has no transformers: activate the environment", "pip install 'deepspeed-recipes[train]'"
    for words, said in (
        ([config_json(num_hidden_layers=5), *EIGHT], activate),
        (["llama3-8b", *EIGHT, "--method", "lora", "lora.target_modules=q_proj"], activate),
        (["nobody/nothing", *EIGHT], install),
    ):
        done = without_the_stack(*words)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) <= 2
    assert "give --gpu NAME" in without_the_stack("llama3-8b").stderr, "without torch no GPU is seen"


def test_4_bit_weights_are_sharded_where_one_gpu_can_load_them(answer, config_json):
    """Llama 2 70B trains so on two GPUs with 40 GB, 36.6 GB each (PEFT, docs/source/accelerate/deepspeed.md)."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    llama2 = config_json(vocab_size=32000, **sizes)
    words = (llama2, "--method", "qlora", "--gpu", "A100-40GB", "--gpus", "2", "sequence_length=2048")
    best = answer(*words)["plans"][0]
    assert best["config"] == "zero3_adapters.json" and best["gpu_peak_gib"] == pytest.approx(36.6, rel=0.03)
    whole = answer(*words, "deepspeed=zero2.json")["plans"][0]
    assert not whole["fits"] and whole["gpu_peak_gib"] > best["gpu_peak_gib"] + 5
    small = answer(
        llama2,
        "--method",
        "qlora",
        "--gpu-memory",
        "24",
        "--gpus",
        "2",
        "deepspeed=zero3_adapters.json",
        "sequence_length=1024",
    )
    assert "while weights are loaded, whole on every rank" in small["plans"][0]["why"]


def test_selective_checkpointing_lies_between_all_and_none(answer):
    plans = [
        answer("llama3-8b", *EIGHT, "deepspeed=zero3.json", "micro_batch_size=1", f"gradient_checkpointing={how}")
        for how in ("true", "selective", "false")
    ]
    peaks, speeds = zip(
        *((one["plans"][0]["gpu_peak_gib"], one["plans"][0]["tokens_per_second_per_gpu"]) for one in plans), strict=True
    )
    assert list(peaks) == sorted(peaks) and list(speeds) == sorted(speeds) and len(set(peaks)) == 3
    assert "gradient_checkpointing=selective" in plans[1]["plans"][0]["command"]


def test_offloaded_activations_make_room_for_longer_sequences(answer):
    """Of Llama 3.1 8B at 128k tokens checkpoints are 32 x 131,072 x 4,096 x 2 bytes: 32 GiB."""
    words = ("llama3-8b", "--method", "lora", "--gpu", "H100", "--gpus", "1", "sequence_length=131072")
    pinned = ("deepspeed=zero2.json", "micro_batch_size=1", "gradient_checkpointing=true", "tiled_loss=true")
    kept, moved = (
        answer(*words, *pinned, "tiled_mlp=true", f"activation_offloading={on}")["plans"][0] for on in ("false", "true")
    )
    away = 27  # five layers' inputs are on their way
    assert kept["gpu_peak_gib"] - moved["gpu_peak_gib"] == pytest.approx(1.07 * away, rel=0.05)
    assert moved["host_gib"] == pytest.approx(3 + 32, rel=0.02), "beside the process itself"
    assert moved["tokens_per_second_per_gpu"] <= kept["tokens_per_second_per_gpu"]


@pytest.fixture
def one_a100(monkeypatch):
    """Let the launcher believe in a GPU; nothing is started on it."""
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: 1)
    monkeypatch.setattr(forecast, "this_machine", lambda: cluster("A100 40GB", 1, host_memory=64))


def test_the_launcher_prints_the_forecast(one_a100, capsys):
    assert launch.main(["llama3-8b", "lora", "--dry-run"]) == 0
    assert re.match(r"forecast: \d+\.\d GiB per GPU \(\d+%.*\), [\d,]+ tokens/s\n", capsys.readouterr().out)


def test_the_forecast_knows_how_long_documents_are(one_a100, capsys, tmp_path):
    def speed(name, lengths, *words):
        file = tmp_path / name
        turns = ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * each}] for each in lengths)
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        run = ["llama3-8b", "lora", "sequence_length=32768", "micro_batch_size=1", "gradient_checkpointing=true"]
        assert launch.main([*run, f"data.path={file}", "model.attention=varlen", *words, "--dry-run"]) == 0
        return int(re.search(r"([\d,]+) tokens/s", capsys.readouterr().out)[1].replace(",", ""))

    short, long = speed("short.jsonl", [400] * 2000), speed("long.jsonl", [130000] * 40)
    assert short > 1.2 * long
    assert speed("short.jsonl", [400] * 2000, "packing=false") < short, "padded, nothing is known of lengths"


@needs_pdsh
def test_the_forecast_of_several_hosts_is_that_of_all_their_gpus(one_a100, printed_by, refusal, tmp_path):
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    assert "forecast: " in printed_by("launch", "llama3-8b", "full", "--hostfile", tmp_path / "hosts", "--dry-run")
    alone = ["llama3-8b", "full", "--hostfile", str(tmp_path / "hosts"), "--nodes", "1", "--dry-run"]
    assert "this run needs" in refusal("launch", *alone)


def test_the_launcher_stops_what_cannot_fit(one_a100, refusal):
    too_much = ["llama3-8b", "lora", "micro_batch_size=64", "--dry-run"]
    said = refusal("launch", *too_much)
    assert re.match(r"launch\.py: this run needs .* on a GPU\.\nWhat fits: .*micro_batch_size=\d+", said)
    fitting = re.search(r"What fits: (.*?);", said)[1].split()
    assert launch.main([*too_much[:3], *fitting, "--dry-run"]) == 0
    assert launch.main([*too_much, "--no-plan"]) == 0
    assert launch.main([*too_much, "--draft"]) == 0


def test_a_batch_that_another_variant_refuses_is_no_error(capsys):
    """The suggestions try every variant of the page; GRPO needs a batch of whole groups of 8 answers."""
    words = ["llama3-8b", "--method", "lora", "--gpu", "3060", "deepspeed=zero0.json", "global_batch_size=4"]
    assert run_command("plan", words) == 1
    shown = capsys.readouterr()
    assert "does not fit" in shown.out and "grpo" not in shown.err and "zero0.json comes closest" in shown.err


def test_auto_lets_the_planner_choose(one_a100, printed_by, refusal):
    shown = printed_by("launch", "llama3-8b", "lora", "deepspeed=auto", "lora.rank=8", "--dry-run", "full")
    assert shown.startswith("deepspeed=auto: ") and '"rank": 8' in shown and "configs/zero" in shown
    assert "deepspeed=auto: nothing fits" in refusal("launch", "llama3-70b", "full", "deepspeed=auto", "--dry-run")


def test_on_cpu_ranks_the_planner_says_nothing(printed_by):
    assert "forecast" not in printed_by("launch", "tiny", "full", "--dry-run")
    shown = printed_by("launch", "tiny", "full", "deepspeed=auto", "--dry-run")
    assert shown.startswith("deepspeed=auto: the GPUs are unknown here, so the recipe keeps its zero3.json; ds-rec")
