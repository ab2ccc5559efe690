"""The recipe pages: what they state is true, and every variant can be launched."""

import copy
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from deepspeed_recipes.commands import launch, page, plan
from deepspeed_recipes.commands import list as family_list
from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.planning.hardware import gpus
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.search import extremes
from deepspeed_recipes.planning.search.strategies import evaluate, plan_request
from deepspeed_recipes.recipe import overrides, pages, run_folder
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import PACKAGE
from deepspeed_recipes.recipe.recipe import Recipe
from deepspeed_recipes.recipe.run_folder import read_json
from deepspeed_recipes.recipe.variants import INHERITED
from deepspeed_recipes.training import run as training_run
from scripts.maintain.documents import index
from tests import ROOT
from tests.conftest import conversation
from tests.versions import has

FAMILIES = [*pages.families(), pages.TEMPLATE]
ALL = [(family, size) for family in FAMILIES for size in pages.page(family).SIZES]
DENSE = [name for name in INHERITED if name != "expert"]
"""What a page of models without experts inherits."""
VARIANTS = [(family, size, name) for family, size in ALL for name in pages.variants(pages.page(family))]


def test_pages_are_found():
    assert ("tiny", "3m") in ALL and len(VARIANTS) >= 300 and len(pages.families()) >= 18
    assert not {"plain_loop", pages.TEMPLATE} & set(pages.families())


def in_the_table(name, variant):
    """Return a cell of the table of hardware; `tests/test_docs.py` checks that the document is up to date."""
    lines = (ROOT / "scripts/README.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| {name} | ") and " x " in line)
    return row.split(" | ")[index.VARIANTS.index(variant) + 1]


def test_a_prediction_is_that_of_the_recipe_as_it_is_written_on_the_smallest_hardware():
    recipe = pages.find("llama3-70b", "lora")
    plan = extremes.smallest_unchanged(recipe)
    assert plan.fits and plan.recipe == recipe and (plan.setup.world_size, plan.cluster.gpu.name) == (4, "H100")
    for cluster in (*(Cluster(gpus.find(name)) for name in extremes.SINGLE), Cluster(gpus.find("H100"), 2)):
        assert not evaluate(plan_request(recipe, cluster), recipe).fits
    assert in_the_table("llama3-70b", "lora") == f"4 x H100 ({plan.gpu_gib:.0f})"
    layout = extremes.smallest_unchanged(pages.find("bloom-176b", "pipeline"))
    assert layout.setup.world_size % 36 == 0, "GPUs come in multiples of what the layout takes"


def test_offloading_is_shown_with_its_host_memory():
    plan = extremes.smallest_unchanged(pages.find("llama3-8b", "full_offload"))
    shown = f"1 x {plan.cluster.gpu.name} ({plan.gpu_gib:.0f}, host {plan.memory.host_gib:,.0f})"
    assert in_the_table("llama3-8b", "full_offload") == shown and plan.memory.host_gib > 8 * 16
    without = extremes.smallest_unchanged(pages.find("llama3-8b", "full"))
    assert without.setup.offload_optimizer == "none" and without.gpu_gib > plan.gpu_gib


def test_measured_peaks_are_in_the_index_and_no_table_is_on_a_page():
    for family in pages.families():
        text = pages.page(family).__doc__
        assert " x H100" not in text and "    size " not in text and "    variant " not in text, family


LAYOUTS = [
    (family, name) for family in FAMILIES for name in ("tensor", "sequence", "pipeline", "three_d", "expert")
    if hasattr(pages.page(family), name)
]  # fmt: skip
NAMED = re.compile(r"The (\S+)(?: with (\S+=\S+))? is predicted to fit on (one|\d+) nodes? of (\d+) (\w+)")


@pytest.mark.parametrize(("family", "variant"), LAYOUTS)
def test_a_layout_fits_the_hardware_that_the_page_names(family, variant):
    doc = " ".join(getattr(pages.page(family), variant).__doc__.split())
    named = NAMED.findall(doc)
    assert named and doc.count(" of 8 ") == len(named), "every layout names a size and its hardware"
    for size, change, nodes, each, gpu in named:
        recipe = overrides.apply(pages.find(f"{family}-{size}", variant), [change] if change else [])
        cluster = Cluster(gpus.find(gpu), int(each), 1 if nodes == "one" else int(nodes))
        plan = extremes.plan_on(recipe, cluster)
        assert plan and plan.fits, f"{size}: {plan and plan.gpu_gib:.1f} GiB"
        assert plan.recipe == recipe, "as it is written, without a larger batch"


def test_a_layout_that_does_not_fit_is_noticed():
    """What the page of llama3 named once: 89.6 GiB by the planner."""
    plan = extremes.plan_on(pages.find("llama3-70b", "tensor"), Cluster(gpus.find("H100"), 8, 4))
    assert plan and not plan.fits
    assert extremes.plan_on(pages.find("llama3-70b", "tensor"), Cluster(gpus.find("H100"), 4)) is None


def test_a_model_of_the_hub_is_found_by_the_words_of_its_name():
    assert pages.split("Qwen2.5-VL-7B") == ("qwen2_5_vl", "7b") and pages.split("qwen2.5-0.5b") == ("qwen2_5", "0.5b")
    assert pages.split("gemma3-vision-4b") == ("gemma3_vision", "4b") and pages.split("tiny") == ("tiny", "")


def test_a_size_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(
        UserError, match=r"unknown size of llama3 '7b'; did you mean '70b'.* There are: 1b, 3b, 8b, 70b"
    ):
        pages.find("llama3-7b", "lora")
    with pytest.raises(UserError, match="unknown variant of mixtral 'lora_'; did you mean 'lora'"):
        pages.find("mixtral-8x7b", "lora_")
    for wrong, right in (("dpo", "dpo_lora"), ("LoRA", "lora"), ("offload", "full_offload")):
        with pytest.raises(UserError, match=f"'{wrong}'; did you mean '{right}'"):
            pages.find("llama3-8b", wrong)
    with pytest.raises(UserError, match="variant of llama3 'sft'; there are: full, lora"):
        pages.find("llama3-8b", "sft")
    with pytest.raises(UserError, match="ds-recipes launch auto Qwen/Qwen3-8B"):
        pages.find("Qwen/Qwen3-8B", "lora")


def test_every_variant_is_a_recipe_with_a_first_line_and_data_that_can_be_read():
    kinds = {}
    for family, size, variant in VARIANTS:
        recipe = pages.find(f"{family}-{size}", variant)
        assert isinstance(recipe, Recipe) and recipe.name == f"{family}-{size}-{variant}"
        about = pages.about(pages.variant(pages.page(family), variant))
        assert about.endswith(".") and len(about) > 20, recipe.name
        kinds[str(recipe.data), recipe.method] = recipe
    assert len(kinds) >= 4
    for recipe in kinds.values():
        preflight.check_data(paths.locate(recipe))


@pytest.mark.parametrize(("family", "size"), ALL)
def test_the_page_states_the_dimensions_and_the_published_size(family, size):
    module = pages.page(family)
    model = module.SIZES[size]
    before = copy.deepcopy(dict(model.config))
    config = AutoConfig.for_model(**model.config)
    # Older ones write rotary settings into the dictionary that they are given.
    assert model.config == before or not has("transformers>=5.17"), (
        "state what transformers adds in place, or the page changes while it is used"
    )
    kind = AutoModelForImageTextToText if model.vision else AutoModelForCausalLM
    with torch.device("meta"):
        counted = sum(p.numel() for p in kind.from_config(config).parameters())
    assert counted == pytest.approx(model.parameters, rel=0.01)
    listed = dict(zip(family_list.SIZES, family_list.size_row(module, size), strict=True))
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    assert int(listed["layers"]) == config.num_hidden_layers
    assert int(listed["hidden"]) == config.hidden_size
    assert int(listed["heads"]) == config.num_attention_heads
    assert listed["parameters"] == pages.human(model.parameters)
    assert listed["context"] == (f"{context:,}" if context else "-")
    assert listed["weights"] == model.path.removeprefix(f"{PACKAGE}/")
    assert listed["licence"] == pages.licence(module, size) and listed["licence"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_run_and_change_lines_of_the_docstring_are_right(family):
    """Two commands, the second with overrides."""
    commands = [line.split() for line in pages.page(family).__doc__.splitlines() if "scripts/launch.py" in line]
    assert len(commands) >= 2 and any("=" in word for word in commands[1])
    for words in commands:
        _, _, recipe, variant, *changes = words[: words.index("#")] if "#" in words else words
        overrides.apply(pages.find(recipe, variant), [change for change in changes if "=" in change])


def test_the_shipped_model_has_the_dimensions_of_the_page():
    stated = pages.page("tiny").SIZES["3m"].config
    shipped = read_json(PACKAGE / "samples" / "tiny_model" / "config.json")
    assert stated.items() <= shipped.items()


# What a page says of itself


@pytest.mark.parametrize("family", pages.families())
def test_pages_have_no_problems(family):
    assert page.problems(pages.page(family)) == []


def test_the_template_is_short_and_only_its_placeholders_are_reported():
    source = ROOT / "recipes" / "_template.py"
    assert len(source.read_text(encoding="utf-8").splitlines()) < 60
    assert pages.variants(pages.page(pages.TEMPLATE)) == ["full", "lora", *DENSE]
    found = page.problems(pages.page(pages.TEMPLATE))
    assert len(found) >= 4 and all("replace the TODO" in problem for problem in found)


def written(folder, **changes):
    """Return the path of a page that somebody has made of the template, with some of its text changed."""
    text = (ROOT / "recipes" / "_template.py").read_text(encoding="utf-8")
    index_line = text.partition("\n")[0]
    text = text.replace(index_line, '"""mine: a model of our own, made of the template.')
    text = text.replace("_template-1b", "mine-1b").replace("TODO when to choose it", "for plenty of data")
    text = text.replace("TODO/Model", "us/Model").replace('"TODO"', '"MIT"').replace("TODO", "Rates: said")
    for before, after in changes.values():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_page_made_from_the_template_has_no_problems_once_filled_in(tmp_path, capsys):
    path = str(written(tmp_path))
    assert page.main(["check", path]) == 0 and capsys.readouterr().out == f"{path}: no problems\n"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        # `parameters` that are still the template's.
        (
            '"intermediate_size": 8192',
            '"intermediate_size": 12288',
            "parameters=1,235,814,400, but its dimensions give",
        ),
        ('"zero2.json"', '"zero22.json"', "deepspeed=zero22.json: "),
        ("parameters=1_235_814_400", "parameters=1_640_000_000", "parameters=1,640,000,000, but its dimensions give"),
        ('"max_position_embeddings": 131072', '"max_position_embeddings": 512', "but the model has 512 positions"),
        (
            "a model of our own, made of the template.",
            "a model.",
            "--list prints, has to be a sentence of more than 20",
        ),
        ('"""mine: ', '"""_template: ', "has to begin with the page's name"),
        ("All weights: for plenty of data.", "All weights: TODO when to choose it.", "replace the TODO"),
        ("python scripts/launch.py mine-1b lora --draft\n", "\n", "needs a command that runs the page"),
        ("mine-1b lora --draft data.path", "llama3-1b lora --draft data.path", "names another page"),
        ("--draft data.path=FILE lora.rank=8", "--draft lora.rnk=8", "lora.rank"),
    ],
)
def test_a_wrong_statement_on_a_page_is_noticed(tmp_path, capsys, before, after, what):
    path = written(tmp_path, one=(before, after))
    assert page.main(["check", str(path)]) == 1 and what in capsys.readouterr().out


# A page outside the project


def test_a_page_outside_the_project_is_launched_listed_and_planned_by_its_path(tmp_path, capsys, printed_by):
    path = written(tmp_path, one=('deepspeed="zero2.json"', 'deepspeed="zero3.json"'))
    shown = json.loads(
        printed_by("launch", f"{path}-1b", "lora", "--draft", "--dry-run", "full", "max_steps=3").partition("\n}")[0]
        + "}"
    )
    assert (shown["family"], shown["size"], shown["variant"]) == ("mine", "1b", "lora")
    assert shown["page"] == str(path) and shown["max_steps"] == 3 and shown["deepspeed"].endswith("zero3.json")
    assert launch.main([str(path), "full", "--draft", "--dry-run"]) == 0, "the size may be left out where there is one"
    capsys.readouterr()

    listed = printed_by("launch", path, "--list")
    assert listed.startswith("mine: a model of our own") and "\n  lora " in listed and "llama3" not in listed
    assert launch.main([str(path), "--list", "--json"]) == 0
    assert [one["recipe"] for one in json.loads(capsys.readouterr().out)] == [f"{path}-1b"] * (2 + len(DENSE))

    answer = json.loads(printed_by("plan", path, "--gpu", "H100", "--method", "lora", "--json"))
    assert answer["model"]["recipe"] == f"{path}-1b" and answer["plans"][0]["fits"]
    assert f"scripts/launch.py {path}-1b lora" in answer["plans"][0]["command"]
    assert plan.main([str(path), "--gpu-memory", "9", "--host-memory", "6"]) == 1
    assert "--method lora (" in capsys.readouterr().err, "what else would fit is looked for on the same page"


def test_a_page_outside_may_have_the_name_of_one_inside(tmp_path, monkeypatch):
    path = tmp_path / "llama3.py"
    path.write_text((ROOT / "recipes" / "llama3.py").read_text().replace("rank=16, alpha=32", "rank=4, alpha=8"))
    monkeypatch.chdir(tmp_path)
    theirs, ours = pages.find("llama3.py-8b", "lora"), pages.find("llama3-8b", "lora")
    assert theirs.lora.rank == 4 and ours.lora.rank == 16
    assert replace(theirs, lora=ours.lora, page="") == ours
    assert pages.find(str(ROOT / "recipes" / "llama3.py") + "-8b", "lora") == ours, (
        "a path into the project is its page"
    )


def test_a_run_of_a_page_outside_is_found_again_and_its_folder_has_a_sane_name(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "runs", lambda: tmp_path / "runs")
    folders = [tmp_path / "a", tmp_path / "b"]
    made = []
    for folder in folders:
        folder.mkdir()
        written(folder).rename(folder / "Our own-model.py")
        recipe = pages.find(f"{folder / 'Our own-model.py'}-1b", "full")
        assert recipe.name == "Our_own_model-1b-full"
        run = run_folder.RunFolder(tmp_path / "runs" / recipe.name / f"2027010{len(made)}")
        run_folder.write_recipe(run, recipe)
        checkpoint = run.checkpoints / "checkpoint-1"
        checkpoint.mkdir(parents=True)
        run_folder.write_json(checkpoint / run_folder.COMPLETE, {"world_size": 2, "layout": {}})
        made.append((recipe, run))
    for recipe, run in made:
        assert run_folder.to_resume(recipe, None) == run, "the newest of this page, not of another of the same name"
        assert pages.page_of(recipe).__file__ == recipe.page


MODEL = "from deepspeed_recipes.recipe import Model\nSIZES = {'1b': Model(path='us/1b')}\n\n"
BROKEN = {
    "import nothing_of_that_name\nSIZES = {}\n": r":1: ModuleNotFoundError: No module named 'nothing_of_that_name'",
    "from dataclasses import replace\nSIZES = {\n": r":2: SyntaxError: '\{' was never closed",
    "X = 1\n": r": not a recipe page, since it defines no SIZES",
    "SIZES = {}\n": r": a page needs at least one size",
    "SIZES = {'1b': 1}\n\ndef full(size):\n    return 3\n": r": SIZES\['1b'\] has to be a Model, not int",
    "import sys\nsys.exit(0)\nSIZES = {}\n": r":2: sys\.exit\(0\): a page may not end the command",
    f"{MODEL}def full(size):\n    exit()\n": r":5: sys\.exit\(None\): a page may not end .* \(in full\('1b'\)\)",
    f"{MODEL}def full(size):\n    return {{}}[size]\n": r":5: KeyError: '1b' \(in full\('1b'\)\)",
    f"{MODEL}def full(size):\n    return 3\n": r": TypeError: a variant returns a Recipe, not int",
}


@pytest.mark.parametrize(("text", "answer"), BROKEN.items())
def test_a_broken_page_is_answered_with_its_file_and_line(tmp_path, refusal, text, answer):
    path = tmp_path / "page.py"
    path.write_text(text)
    for command, words in (("launch", ["full"]), ("plan", ["--gpu", "H100"])):
        said = refusal(command, path, *words)
        assert re.search(re.escape(str(path)) + answer, said) and said.count("\n") <= 2, said
    with pytest.raises(UserError, match=r"nowhere\.py: no such file"):
        pages.find(str(tmp_path / "nowhere.py"), "full")


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        ('"1b": Model', "1: Model", r"SIZES\[1\]: a size is named by a text of letters"),
        ('"1b": Model', '"org/x": Model', r"SIZES\['org/x'\]: a size is named by a text of letters"),
        ('"1b": Model', '"": Model', r"SIZES\[''\]: a size is named by a text of letters"),
        ("parameters=1_235_814_400", "parameters='1B'", r"SIZES\['1b'\]\.parameters='1B': must be a whole number"),
        ('"hidden_size": 2048', '"hidden_size": "2048"', r"SIZES\['1b'\]\.config: hidden_size='2048': must be a whole"),
        ('"hidden_size": 2048,', "", r"SIZES\['1b'\]\.config: has no hidden_size; copy it"),
        ('"model_type": "llama",', "", r"SIZES\['1b'\]\.config: needs the model_type"),
        ('"MIT"', "3", r"LICENCE=3: must be a dict such as \{'1b': 'MIT'\}"),
        ('"MIT"', '{"8b": "MIT"}', r"LICENCE: unknown name '8b'; did you mean '1b'"),
        ('LICENCE = "MIT"', 'WITHOUT = {"grpo"}', r"WITHOUT=\{'grpo'\}: must be a dict such as"),
        ('LICENCE = "MIT"', 'WITHOUT = {"grpo": None}', r"WITHOUT=\{'grpo': None\}: must be a dict such as"),
        ('LICENCE = "MIT"', 'WITHOUT = {"grppo": "no"}', r"WITHOUT: unknown name 'grppo'; did you mean 'grpo'"),
    ],
)
def test_a_table_of_a_page_that_cannot_be_used_is_refused(tmp_path, before, after, answer):
    with pytest.raises(UserError, match=rf"^\S+mine\.py: {answer}"):
        pages.known_page(str(written(tmp_path, one=(before, after))))


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        ("learning_rate=2e-5", "learning_rate='2e-5'", r"learning_rate='2e-5': must be a number"),
        ("global_batch_size=64", "global_batch_size=64.0", r"global_batch_size=64\.0: must be a whole number"),
        ("data=CHAT", "data='x.jsonl'", r"data='x\.jsonl': must be Data\(\.\.\.\)\."),
        ("lora=Lora(rank=16, alpha=32)", "lora=dict(rank=16)", r"lora=\{.rank.: 16\}: must be Lora\(.* or None\."),
        ("data=CHAT", "data=CHAT, method=['dpo']", r"method=\['dpo'\]: must be one of sft, "),
        ("data=CHAT", "data=CHAT, precision='BF16'", r"precision='BF16': must be one of fp32, bf16, fp16"),
    ],
)
def test_a_value_of_a_wrong_type_on_a_page_is_shown_as_it_is_written(tmp_path, before, after, answer):
    path = str(written(tmp_path, one=(before, after)))
    with pytest.raises(UserError, match=rf"mine\.py:\d+: {answer}"):
        pages.find(path, "lora")


def test_a_page_imports_a_module_beside_it_and_may_lack_the_usual_if(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rates_of_ours.py").write_text("FULL = 3e-5\n")
    own = ('LICENCE = "MIT"', "import rates_of_ours")
    path = written(tmp_path, one=own, two=("learning_rate=2e-5", "learning_rate=rates_of_ours.FULL"))
    path.write_text(path.read_text().replace('if __name__ == "__main__":', "if True:"))
    assert pages.find(str(path), "full").learning_rate == 3e-5


def test_sizes_and_variants_of_a_page_outside_are_answered_with_the_nearest(tmp_path):
    path = written(tmp_path)
    with pytest.raises(UserError, match=r"unknown size of .*mine\.py '2b'; did you mean '1b'"):
        pages.find(f"{path}-2b", "full")
    with pytest.raises(UserError, match=r"unknown variant of .*mine\.py 'loras'; did you mean 'lora'"):
        pages.find(str(path), "loras")
    assert pages.choices(str(path)) == (
        f"{path}: name a variant too: full, lora, {', '.join(DENSE)}. Sizes: {path}-1b."
    )


@pytest.mark.every
def test_a_draft_of_a_page_outside_trains_and_resumes(ranks, tmp_path):
    changes = ["max_steps=2", "save_steps=1", "logging_steps=1", "sequence_length=256", "global_batch_size=2"]
    page = pages.find(f"{written(tmp_path)}-1b", "lora")
    data = replace(page.data, path=str(tmp_path / "train.jsonl"), validation=None)
    (tmp_path / "train.jsonl").write_text(4 * (json.dumps(conversation("1 + 1?", "2")) + "\n"))
    recipe = overrides.apply(replace(page, data=data), [*changes, "wandb.mode=disabled", "packing=false"])
    recipe = paths.locate(replace(recipe, draft=replace(recipe.draft, enabled=True)))
    run = run_folder.RunFolder(tmp_path / "run")
    run_folder.write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    assert [row["step"] for row in run_folder.read_jsonl(run.metrics)] == [1, 2] and run.export.is_dir()

    for lost in (run.checkpoints / "checkpoint-2", run.export):
        shutil.rmtree(lost)
    run.summary.unlink()
    assert run_folder.to_resume(page, run.path) == run and run_folder.read_recipe(run) == recipe
    run_folder.forget_after(run, run.checkpoints / "checkpoint-1")
    ranks.check(training_run.main, str(run.path), log=tmp_path / "again.log")
    assert [row["step"] for row in run_folder.read_jsonl(run.metrics)] == [1, 2] and run.export.is_dir()


# Variants that a page inherits


def test_every_inherited_variant_of_the_template_builds():
    module = pages.page(pages.TEMPLATE)
    recipes = {name: pages.build(module, "1b", name) for name in DENSE}
    assert {name: recipe.variant for name, recipe in recipes.items()} == {name: name for name in DENSE}
    assert all((recipe.lora is not None) == (INHERITED[name].start == "lora") for name, recipe in recipes.items())
    assert recipes["qlora"].model.quantization == "nf4" and recipes["dora"].lora.dora
    assert recipes["full_offload"].deepspeed == "zero2_offload.json"
    methods = {"qlora": "sft", "dora": "sft", "full_offload": "sft"}
    for name, recipe in recipes.items():
        assert recipe.method.name == methods.get(name, name.removesuffix("_lora").removesuffix("_full"))


LEFT_OUT = [
    (family, name, reason)
    for family in FAMILIES
    for name, reason in pages.without(pages.page(family)).items()
    if name not in pages.variants(pages.page(family))
]


def test_a_page_inherits_what_it_does_not_leave_out():
    assert len(LEFT_OUT) > 90
    for family in FAMILIES:
        module = pages.page(family)
        missing = {name for name in INHERITED if name not in pages.variants(module)}
        assert missing == {name for one, name, _ in LEFT_OUT if one == family}
        stated = getattr(module, "WITHOUT", {})
        assert stated.keys() <= INHERITED.keys() and not any(hasattr(module, name) for name in stated), "no dead entry"


def test_the_reason_is_printed_when_a_variant_that_is_left_out_is_asked_for():
    for family, name, reason in LEFT_OUT:
        size = next(iter(pages.page(family).SIZES))
        with pytest.raises(UserError) as raised:
            pages.find(f"{family}-{size}", name)
        assert str(raised.value) == f"{family} has no {name}: {reason}." and len(reason) > 20


def test_a_page_overrides_a_variant_and_leaves_one_out(tmp_path):
    own = (
        'WITHOUT = {"grpo": "nothing to score"}\n\n\ndef qlora(size: str) -> Recipe:\n'
        '    """Of our own."""\n    return lora(size)\n\n\nif __name__ =='
    )
    path = written(tmp_path, one=("if __name__ ==", own))
    module = pages.known_page(str(path))
    assert pages.variants(module) == ["full", "lora", "qlora", *(n for n in DENSE if n not in ("qlora", "grpo"))]
    assert pages.about(pages.variant(module, "qlora")) == "Of our own."
    assert pages.find(str(path), "qlora").model.quantization == pages.find(str(path), "lora").model.quantization
    with pytest.raises(UserError, match=r"has no grpo: nothing to score\.$"):
        pages.find(str(path), "grpo")


@pytest.mark.parametrize(("length", "sizes"), [(256, ["1b"]), (257, [])])
def test_an_inherited_variant_that_a_pages_sizes_rule_out_is_listed_with_the_reason(tmp_path, length, sizes):
    path = written(tmp_path, one=("sequence_length=4096", f"sequence_length={length}"))
    listed, entries = (family_list.listing(as_json, str(path)) for as_json in (False, True))
    why = "grpo.max_new_tokens=256: leaves no room for a prompt in sequence_length=256"
    assert (f"\n  grpo of 1b  not possible: {why}" in listed) == bool(sizes) and "\n  pretrain  " in listed
    ruled_out = [one for one in json.loads(entries) if "impossible" in one]
    assert [(one["size"], one["variant"]) for one in ruled_out] == [(size, "grpo") for size in sizes]
    assert len(json.loads(entries)) == 2 + len(DENSE)
    assert page.problems(pages.known_page(str(path))) == []


def test_one_family_is_listed_with_its_tables():
    text = family_list.tables(pages.page("llama3"))
    lines = [line.split() for line in text.splitlines()]
    assert ["8b", "32", "4096", "32", "8.03B", "131,072", "Llama-3.1", "meta-llama/Llama-3.1-8B-Instruct"] in lines
    assert ["qlora", "SFT", "adapters", "zero2.json"] in lines
    assert "  pretrain      raw text  all weights  zero2.json (1b, 3b), zero3.json (8b, 70b, 405b)\n" in text
    predicted = lines[lines.index(["variant", "1b", "3b", "8b", "70b", "405b"]) :]
    assert "Predicted, not measured" in text and [line[0] for line in predicted[1:]] == pages.variants(
        pages.page("llama3")
    )
    cell = in_the_table("llama3-70b", "lora").partition(" (")[0]
    row = next(line for line in text.splitlines() if line.startswith("  lora ") and " x " in line)
    assert cell == "4 x H100" and f"  {cell}  " in row, "as in scripts/README.md"


@pytest.mark.parametrize("page", ["mixtral-8x7b", "qwen3_moe-30b-a3b"])
def test_a_mixture_says_why_it_is_not_in_4_bits(page):
    with pytest.raises(UserError, match=r"has no qlora: .* one 3-D weight,\nwhich bitsandbytes does not pack"):
        pages.find(page, "qlora")
    assert pages.find(page, "lora")
