"""`shrink`: a student computes with what was kept, the shipped one is made by it, and what cannot be cut is refused."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, FalconConfig, Gemma2Config

from deepspeed_recipes.commands import shrink as command
from deepspeed_recipes.export import shrink
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_STUDENT, TINY_TEACHER

WINDOW, WHOLE = "sliding_attention", "full_attention"


def test_layers_are_evenly_spaced_with_the_first_and_the_last():
    def kept(before, after):
        return shrink._chosen("model", {"num_hidden_layers": before}, after, None)[0]

    assert kept(4, 2) == [0, 3] and kept(5, 5) == kept(5, None) == [0, 1, 2, 3, 4]
    assert kept(36, 18)[:3] == [0, 2, 4] and kept(36, 18)[-1] == 35
    for before in range(2, 40):
        for after in range(2, before + 1):
            found = kept(before, after)
            assert len(set(found)) == after and (found[0], found[-1]) == (0, before - 1) and found == sorted(found)


def test_the_shipped_student_is_cut_out_of_the_shipped_teacher(tmp_path, printed_by):
    words = [TINY_TEACHER, "--layers", "2", "--intermediate", "208", "--output", str(tmp_path / "student")]
    assert "1,009,024 of 3,049,984 parameters; layers 0, 3; feed-forward width 208" in printed_by("shrink", *words)
    for file in Path(TINY_STUDENT).iterdir():
        if file.suffix != ".md":
            assert file.read_bytes() == (tmp_path / "student" / file.name).read_bytes(), file.name
    size = sum(file.stat().st_size for file in Path(TINY_TEACHER).iterdir())
    assert size < 8e6


def test_the_student_computes_with_the_kept_layers_and_neurons(tmp_path):
    shrink.shrink(TINY_TEACHER, tmp_path / "student", 3, 100)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    teacher = AutoModelForCausalLM.from_pretrained(TINY_TEACHER).eval()
    teacher.model.layers = torch.nn.ModuleList([teacher.model.layers[number] for number in (0, 2, 3)])
    for number, layer in enumerate(teacher.model.layers):
        layer.self_attn.layer_idx = number
        gate, up, down = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
        weakest = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).argsort()[:-100]
        down.data[:, weakest] = 0  # as if they were not there
    teacher.config.num_hidden_layers = 3
    tokens = AutoTokenizer.from_pretrained(tmp_path / "student")("Tilda Marman paid 51.00 GBP.", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(student(**tokens).logits, teacher(**tokens).logits)
    assert student.config.layer_types == ["full_attention"] * 3
    stored = load_file(tmp_path / "student" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values()), "as the teacher's"


def test_a_model_without_an_intermediate_size_keeps_its_width(tmp_path):
    """Falcon's config calls it `ffn_hidden_size`."""
    config = FalconConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=64, ffn_hidden_size=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    assert "intermediate_size" not in read_json(tmp_path / "teacher" / "config.json")
    shrink.shrink(str(tmp_path / "teacher"), tmp_path / "student", 2, None)
    student, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student", output_loading_info=True)
    assert student.config.num_hidden_layers == 2 and not loaded["missing_keys"] and not loaded["unexpected_keys"]


def test_layers_keep_their_kind_where_no_list_names_it(tmp_path):
    """Gemma 2's published config.json says nothing of it: every second layer attends to a window."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma2Config(**sizes, head_dim=8, num_hidden_layers=5, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    file = tmp_path / "teacher" / "config.json"
    write_json(file, {name: value for name, value in read_json(file).items() if name != "layer_types"})
    assert AutoConfig.from_pretrained(file.parent).layer_types == [WINDOW, WHOLE, WINDOW, WHOLE, WINDOW]
    shrink.shrink(str(file.parent), tmp_path / "student", 3, None)
    assert AutoConfig.from_pretrained(tmp_path / "student").layer_types == [WINDOW, WINDOW, WINDOW]


def test_fused_gates_are_cut_in_both_halves():
    torch.manual_seed(0)
    both, down = torch.randn(8, 3), torch.randn(3, 4)
    state = {"layers.0.mlp.gate_up_proj.weight": both, "layers.0.mlp.down_proj.weight": down}
    found = shrink._narrowed("model", state, 2)
    best = (both[:4].norm(dim=1) * both[4:].norm(dim=1) * down.norm(dim=0)).topk(2).indices.sort().values
    assert torch.equal(found["layers.0.mlp.gate_up_proj.weight"], torch.cat([both[best], both[best + 4]]))
    assert torch.equal(found["layers.0.mlp.down_proj.weight"], down[:, best])


REFUSED = {
    "--layers 5": r"--layers 5: the model has 4 layers; keep between 2",
    "--layers 1": r"--layers 1: the model has 4",
    "--intermediate 641": r"--intermediate 641: the model's is 640",
    "--intermediate 0": r"--intermediate 0: the model's is 640",
    "--hidden 128": r"--hidden: every layer reads and adds to one stream",
    "": r"nothing to do; add --layers N",
}


@pytest.mark.parametrize("words", REFUSED)
def test_sizes_that_cannot_be_cut_are_refused(tmp_path, words):
    with pytest.raises(UserError, match=REFUSED[words]):
        command.main([TINY_TEACHER, *words.split(), "--output", str(tmp_path / "student")])
    assert not (tmp_path / "student").exists()


def test_folders_that_cannot_be_read_or_written_are_refused(tmp_path):
    empty, bare = tmp_path / "empty", tmp_path / "bare"
    empty.mkdir()
    with pytest.raises(UserError, match=r"this folder has no config.json"):
        shrink.shrink(str(empty), tmp_path / "student", 2, None)
    shutil.copytree(TINY_TEACHER, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match=r"has no .safetensors file"):
        shrink.shrink(str(bare), tmp_path / "student", 2, None)
    with pytest.raises(UserError, match=r"--output .*bare: exists and is not empty; choose a new folder"):
        shrink.shrink(TINY_TEACHER, bare, 2, None)
    with pytest.raises(UserError, match=r"nobody/nothing: no such folder, and not on the Hub"):
        shrink.shrink("nobody/nothing", tmp_path / "student", 2, None)


def test_architectures_that_cannot_be_cut_are_refused(tmp_path):
    folder = tmp_path / "experts"
    shutil.copytree(TINY_TEACHER, folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"num_experts": 8})
    with pytest.raises(UserError, match=r"--intermediate 64: .* has no plain feed-forward layers"):
        shrink.shrink(str(folder), tmp_path / "student", None, 64)
    write_json(folder / "config.json", config | {"num_hidden_layers": 5})
    with pytest.raises(UserError, match=r"its files have 0 lists of 5 layers"):
        shrink.shrink(str(folder), tmp_path / "student", 2, None)
    write_json(folder / "config.json", config)
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"what is left of it is not a model that transformers loads: model\.norm"):
        shrink.shrink(str(folder), tmp_path / "student", 2, None)
    assert not (tmp_path / "student").exists() and json.loads((folder / "config.json").read_text()) == config


def killed_at(place, output, moment):
    """Shrink in a process that is killed when it has touched `place` `moment` times; return whether it was."""
    process = os.fork()
    if not process:
        touched = 0

        def count(event, arguments):
            nonlocal touched
            if any(isinstance(one, str | os.PathLike) and str(place) in os.fspath(one) for one in arguments):
                touched += 1
                if touched > moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            shrink.shrink(TINY_TEACHER, output, 2, 208)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.parametrize(("first", "step"), [(0, 6), pytest.param(0, 1, marks=pytest.mark.every)])
def test_a_kill_at_any_moment_leaves_nothing_or_the_whole_model(tmp_path, first, step):
    expected = {file.name for file in Path(TINY_STUDENT).iterdir() if file.suffix != ".md"}
    for moment in range(first, 1000, step):
        output = tmp_path / str(moment) / "student"
        (output if moment % 2 else output.parent).mkdir(parents=True)  # a new folder, or an empty one
        if not killed_at(tmp_path, output, moment):
            break
        found = {file.name for file in output.iterdir()} if output.exists() else set()
        assert found in (set(), expected), moment
    assert moment > 4 * step, "some moments were tried"
    until = time.monotonic() + 30
    while (left := [*tmp_path.glob("*/student.*")]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    assert {file.name for file in (tmp_path / str(moment) / "student").iterdir()} >= expected
