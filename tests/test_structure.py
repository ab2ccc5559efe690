"""The structure of the code: which way imports run, and that pinned versions are installed and tested."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from deepspeed_recipes.launching.ray import cluster
from deepspeed_recipes.recipe.pages import families
from tests import ROOT
from tests.versions import pins

LAYERS = {
    "recipe": set(),
    "samples": set(),
    "config": {"recipe"},
    "machine": {"recipe"},
    "report": {"recipe"},
    "planning": {"recipe"},
    "training": {"recipe", "machine", "report"},
    "launching": {"recipe", "config", "machine", "report", "training"},
    "export": {"recipe", "machine", "training"},
    "prove": {"recipe", "machine", "training", "launching"},
    "benchmarks": {"recipe", "machine", "planning", "training", "launching"},
}
LAYERS["commands"] = set(LAYERS)
"""What each package may import from the others. `report` reads run folders and nothing else, so that a training that
another launcher has started can write its report."""
PACKAGE = ROOT / "src" / "deepspeed_recipes"
PLANNING = ("hardware", "model_profile", "cost", "search")
"""The packages of `deepspeed_recipes.planning`, each of which imports only from those before it."""


def imports(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file or a notebook imports, at any depth."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{absolute(path, node)}.{alias.name}" for alias in node.names}
    return found


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that a statement imports from."""
    if not node.level:
        return node.module
    parents = path.relative_to(PACKAGE.parent if path.is_relative_to(PACKAGE) else ROOT).parts[: -node.level]
    return ".".join([*parents, *filter(None, [node.module])])


def packages_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("deepspeed_recipes.")}


@pytest.mark.parametrize("package", LAYERS)
def test_imports_run_one_way(package):
    assert set(LAYERS) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"samples"}
    files = list((PACKAGE / package).rglob("*.py"))
    for file in files:
        used = imports(file)
        assert all(name.split(".")[1] in LAYERS for name in used if name.startswith("deepspeed_recipes.")), file
        assert packages_of(used) <= LAYERS[package] | {package}, file
        assert not any(name.split(".")[0] in ("scripts", "tests") for name in used), file


@pytest.mark.parametrize("package", PLANNING)
def test_imports_inside_the_planner_run_one_way(package):
    folders = {path.parent.name for path in (PACKAGE / "planning").glob("*/__init__.py")}
    assert folders == set(PLANNING)
    allowed = {*PLANNING[: PLANNING.index(package) + 1], "TABLES"}  # data, in a root that imports nothing of its own
    for file in (PACKAGE / "planning" / package).rglob("*.py"):
        used = {name.split(".")[2] for name in imports(file) if name.startswith("deepspeed_recipes.planning.")}
        assert used <= allowed, file
    assert not packages_of(imports(PACKAGE / "planning" / "__init__.py"))


def sources() -> list[Path]:
    """Return every Python file of the project that is no test."""
    return [path for place in (PACKAGE, ROOT / "recipes", ROOT / "scripts") for path in place.rglob("*.py")]


def modules() -> dict[str, Path]:
    """Return the file of every module of the package, of its pages and of what maintainers run, by its dotted name."""
    found = {}
    for path in sources():
        parts = path.relative_to(PACKAGE.parent if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return which modules each module imports, at its top or in a function."""
    edges = {}
    for module, path in known.items():
        # `from a import b` imports a.b where that is a module, and a otherwise.
        names = {name if name in known else name.rpartition(".")[0] for name in imports(path)}
        edges[module] = {name for name in names if name in known and name != module}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules each of which imports, directly or not, all others of its group."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in edges[waiting.pop()] - found:
                found.add(name)
                waiting.append(name)
        return found

    reached = {module: reachable(module) for module in edges}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in edges}
    return sorted(sorted(group) for group in groups if group)


def test_no_modules_import_each_other_in_a_circle():
    edges = graph(modules())
    assert len(edges) > 100 and "deepspeed_recipes.recipe" in edges["recipes.llama3"]
    assert cycles(edges) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_one_place_parses_a_deepspeed_file():
    """Except for the linter, which judges every key, the two modules that write one, and the proofs, each a script."""
    known = modules()
    alone = ("deepspeed_recipes.config", "deepspeed_recipes.prove.defects", "scripts.maintain.schema")
    exempt = {path for name, path in known.items() if name.startswith(alone)}
    others = set(known.values()) - exempt - {ROOT / "recipes" / "plain_loop.py", PACKAGE / "benchmarks" / "probe.py"}
    parsing = [path for path in others if '"zero_optimization"' in path.read_text(encoding="utf-8")]
    assert parsing == [PACKAGE / "recipe" / "deepspeed_file.py"]


def test_a_parsed_command_line_stays_in_its_command():
    """What the rest gets is a frozen dataclass or plain arguments, which say what there is to read."""
    defects = PACKAGE / "prove" / "defects"  # scripts that call libraries' own commands
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(defects)]
    naming = {path.relative_to(PACKAGE).parts[0] for path in files if re.search(r"\bNamespace\b", path.read_text())}
    assert naming == {"commands"}
    launch = {path.name for path in (PACKAGE / "commands" / "launch").glob("*.py") if "Namespace" in path.read_text()}
    assert launch == {"options.py"}


def test_notebooks_import_the_project_and_nothing_imports_them():
    notebooks, known = list((ROOT / "notebooks").glob("*.ipynb")), modules()
    for file in notebooks:
        used = imports(file)
        assert packages_of(used) and packages_of(used) <= {"training", "planning", "report", "recipe"}, file
        for name in used:
            owner, _, own = name.rpartition(".")
            if name.startswith("deepspeed_recipes.") and name not in known:
                assert re.search(rf"^(def |class )?{own}\b", known[owner].read_text(), re.MULTILINE), (
                    f"{file}: no {name}"
                )
        assert not any(name.split(".")[0] in ("scripts", "tests") for name in used), file
    for file in sources():
        assert not any(name.split(".")[0] == "notebooks" for name in imports(file)), file


def test_pages_import_only_the_vocabulary():
    assert len(families()) >= 1
    for family in families():
        allowed = {"dataclasses.replace", "deepspeed_recipes.launch"}
        used = imports(ROOT / "recipes" / f"{family}.py")
        assert all(name in allowed or name.startswith("deepspeed_recipes.recipe.") for name in used), family


def test_the_vocabulary_is_standard_library_only():
    files = list((PACKAGE / "recipe").rglob("*.py"))
    assert len(files) > 20
    for file in files:
        roots = {name.split(".")[0] for name in imports(file)}
        assert roots <= set(sys.stdlib_module_names) | {"deepspeed_recipes"}, file


def test_a_forbidden_import_is_noticed(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("def f():\n    from deepspeed_recipes.training import run\n    import torch\n")
    assert packages_of(imports(page)) == {"training"} and "torch" in imports(page)


def test_hooks_run_the_tools_that_are_pinned():
    hooks = dict(re.findall(r"([\w-]+)==([\w.]+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert {"ruff", "mypy"} <= set(hooks) and len(hooks) >= 5
    assert {name: pins()[name] for name in hooks if name in pins()} == {
        name: version for name, version in hooks.items() if name != "pre-commit-hooks"
    }


@pytest.mark.parametrize(
    ("subject", "refused"),
    [
        ("Count DoRA's extra pass in step time", False),
        ("Use the draft's limit where it helps", False),
        ("x" * 73, True),
        ("X" * 72, False),
        ("Adds a hook", True),
        ("Fixed a hook", True),
        ("add a hook", True),
        ("Add a hook.", True),
        ("Add a hook.\n\nWhy.", True),
        ("Add a hook\n\nIt is needed.", False),
    ],
)
def test_the_hook_reads_a_commit_subject(subject, refused):
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    pattern = next(hook["entry"] for hook in hooks if hook["id"] == "commit-subject")
    assert bool(re.search(pattern, subject, re.MULTILINE)) == refused


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run"]
    called = [re.findall(r"^(?:\s*- run: )?make ([a-z-]+)", path.read_text(), re.MULTILINE) for path in workflows]
    assert len(workflows) == 3 and set().union(*called) >= {"check", "quick", "test", "test-all"}
    assert set().union(*called) <= targets


def test_the_changelog_has_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_requirement_is_pinned_and_installed_at_its_pin():
    pinned = pins()
    assert len(pinned) > 80
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"train", "serve", "ray", "fp8", "notebook", "test", "dev"}
    assert extras.pop("ray") == ["ray[train]"]  # `make ray` adds it
    assert extras.pop("fp8") == ["torchao"]  # `make fp8` adds it
    assert extras.pop("notebook") == ["jupyterlab"]  # `make notebook` adds it
    beside = pins(ROOT / "constraints-ray.txt")
    assert beside["ray"] == cluster.VERSION and not set(beside) & set(pinned)
    wanted = [re.match(r"[\w.-]+", line)[0] for part in (project["dependencies"], *extras.values()) for line in part]
    assert set(wanted) <= set(pinned)
    if Path(sys.prefix) == ROOT / ".venv":
        for name, pin in pinned.items():
            assert version(name).split("+")[0] == pin, name


def test_no_file_is_larger_than_8_mb_and_lint_is_clean():
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in tracked.split("\0") if name]
    assert len(files) > 30
    assert all(file.stat().st_size <= 8 * 2**20 for file in files if file.exists())
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


TRAINING_LAYERS = (
    ("run",),
    ("methods", "arguments", "export", "summary", "without_launcher"),
    ("trainer",),
    ("callbacks", "optimizer", "tracking"),
    ("checkpoint",),
    ("parallel",),
    ("own_code",),
    ("data",),
    ("model",),
    ("activation_checkpointing", "model_folder"),
    ("console",),
    ("distributed", "rendezvous", "server"),
    ("upstream", "peft_without_bitsandbytes"),
)
"""The files and folders of `src/deepspeed_recipes/training`, from the top: each imports only from layers below its
own, so that no two import each other in a circle."""


def parts_of_training(names: set[str]) -> set[str]:
    return {name.split(".")[2] for name in names if name.startswith("deepspeed_recipes.training.")}


def test_layers_of_training_import_downwards():
    """Every file and folder has its layer: one that is not in the list fails the first assertion."""
    place = PACKAGE / "training"
    found = {path.stem for path in place.glob("*.py")} | {path.parent.name for path in place.glob("*/__init__.py")}
    assert sorted(name for layer in TRAINING_LAYERS for name in layer) == sorted(found - {"__init__"})
    for number, layer in enumerate(TRAINING_LAYERS):
        below = {name for lower in TRAINING_LAYERS[number + 1 :] for name in lower}
        for name in layer:
            for file in (place / name).rglob("*.py") if (place / name).is_dir() else [place / f"{name}.py"]:
                assert parts_of_training(imports(file)) <= below | {name}, file


def test_packages_of_training_import_each_other_in_no_circle():
    known = {name: path for name, path in modules().items() if name.startswith("deepspeed_recipes.training.")}
    edges: dict[str, set[str]] = {name.split(".")[2]: set() for name in known}
    for module, targets in graph(known).items():
        edges[module.split(".")[2]] |= parts_of_training(targets) - {module.split(".")[2]}
    assert len(edges) > 20 and cycles(edges) == []


MOST_ANY = 296
"""Lines of the package that may name `typing.Any`; lower it with each change that removes some, never raise it. Parsed
JSON is `recipe.files.Json`, or `JsonView` where it is only read."""


def test_any_only_gets_rarer():
    lines = [line for path in PACKAGE.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    assert len([line for line in lines if re.search(r"\bAny\b", line)]) <= MOST_ANY


HOMES = ("upstream.py", "model/transforms.py")
"""Where training changes objects that are not its own: workarounds for defects, and changes to the model."""
OTHERS = {
    # What a library documents to be set: the Trainer's control, autograd's context, a tokenizer's template.
    "callbacks/evaluation.py": {
        "control.should_log",
        "control.should_evaluate",
        "control.should_save",
        "control.should_training_stop",
    },
    "callbacks/metrics.py": {"control.should_log"},
    "callbacks/stopping.py": {
        *("control.should_epoch_stop", "control.should_evaluate", "control.should_log", "control.should_save"),
        "control.should_training_stop",
    },
    "trainer.py": {"self.control.should_training_stop"},
    "methods/distillation/divergence.py": {"ctx.dtypes"},
    "parallel/sequence.py": {
        "context.group",
        "config._attn_implementation",  # switched in every pass
        "seen['config']._attn_implementation",  # of a copy
    },
    "data/chat_templates.py": {"probe.chat_template", "tokenizer.chat_template", "tokenizer.pad_token"},
    "model/draft.py": {"found.video_settings", "reader.chat_template", "tokenizer.chat_template"},
    "model/processor.py": {"found.video_settings", "processor.chat_template", "processor.tokenizer"},
    # Marks that DeepSpeed reads.
    "optimizer.py": {"weight.use_muon"},
    "parallel/pipeline.py": {"parameter.ds_pipe_replicated", "parameter.model_parallel", "output.function"},
    # Values of an object that was made for this.
    "data/text_files.py": {"error.filename"},
    "methods/classify.py": {"model.config.get_text_config().pad_token_id"},
    "methods/rollouts/hooks.py": {"function.__name__"},
    "model/load.py": {"config._attn_implementation", "text.tie_word_embeddings", "one.quantization_config"},
    "model/lora.py": {"ctx.scaling", "parameter.data"},
    "model/probe.py": {"setattr(small)", "small.use_cache"},
    # After training: the merged model.
    "export.py": {"model.all_tied_weights_keys", "one.tie_word_embeddings", "output.weight"},
}
"""The other assignments, all of them, by file of `src/deepspeed_recipes/training`."""


def assigned(path: Path) -> set[str]:
    """Return the attributes that a file sets of anything but `self`, as `engine.total_loss` or `setattr(layer)`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "sys"):
                found.add(ast.unparse(node))
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in ("setattr", "delattr", "object.__setattr__") and ast.unparse(node.args[0]) not in ("self", "cls"):
            found.add(f"{called}({ast.unparse(node.args[0])})")
    return found


def test_two_modules_of_training_change_what_is_not_theirs():
    place = PACKAGE / "training"
    found = {str(file.relative_to(place)): assigned(file) for file in place.rglob("*.py")}
    for home in HOMES:
        assert len(found.pop(home)) > 10
    assert {file: targets for file, targets in found.items() if targets} == OTHERS


def test_nothing_outside_training_changes_an_engine_or_a_trainer():
    parts = ("trainer", "engine", "accelerator", "deepspeed")
    for file in set(sources()) - {ROOT / "recipes" / "plain_loop.py"} - set((PACKAGE / "training").rglob("*.py")):
        assert not any(part in target.split(".")[:-1] for target in assigned(file) for part in parts), file


def test_an_assignment_is_noticed(tmp_path):
    page = tmp_path / "page.py"
    page.write_text(
        "trainer.deepspeed.total = 1\nself.engine = engine\nsetattr(engine.module, 'a', 2)\nx.trainer.y += 1\n"
        "layer.__class__ = other\nlayer.forward, self.a.b = call, 1\nfor it.x in y: pass\ndel it.z"
    )
    assert assigned(page) == {
        *("trainer.deepspeed.total", "setattr(engine.module)", "x.trainer.y", "layer.__class__", "layer.forward"),
        *("self.a.b", "it.x", "it.z"),
    }


def patched(path: Path) -> set[str]:
    """Return the attributes of imported names, the standard library's aside, that a file sets: `load.load_config`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            root = "." * getattr(node, "level", 0) or getattr(node, "module", None)
            for alias in node.names:
                if (root or alias.name).split(".")[0] not in sys.stdlib_module_names:
                    known.add((alias.asname or alias.name).split(".")[0])
    set_there = {ast.unparse(node) for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)}
    return {target for target in set_there if "." in target and target.split(".")[0] in known and "[" not in target}


def test_only_upstream_replaces_what_others_define():
    files = sources()
    # gguf_convert.py runs beside llama.cpp's converter in the serving environment, which cannot import the project.
    assert {file.name for file in files if patched(file)} == {"upstream.py", "gguf_convert.py"}


def test_a_replaced_function_is_noticed(tmp_path):
    page = tmp_path / "page.py"
    page.write_text(
        "import os\nfrom ..model import load, check\nos.environ = {}\nload.config = check.config = lambda: 1\nx.y = 2"
    )
    assert patched(page) == {"load.config", "check.config"}


TABLE = ("recipe/compatibility.py", "recipe/limits.py", "recipe/methods/")
"""The table, the module that reads it for layouts, and the methods, which check their own settings."""
COMBINED = re.compile(r"layout\b|(?:[\w.]|\{\})+=\S+ with (?!model\.attention)(?:[\w.]|\{\})+=|method=\S+ with ")


def refused_combinations(path: Path) -> list[str]:
    """Return the messages with which a file refuses a layout, or two settings that it names: `KEY=... with KEY=...`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            parts = node.exc.args[0].values if isinstance(node.exc.args[0], ast.JoinedStr) else [node.exc.args[0]]
            texts = [part.value if isinstance(part, ast.Constant) else "{}" for part in parts]
            if ast.unparse(node.exc.func) == "UserError" and COMBINED.match("".join(map(str, texts))):
                found.append("".join(map(str, texts)))
    return found


def test_one_table_refuses_combinations():
    files = [file for file in PACKAGE.rglob("*.py") if not str(file.relative_to(PACKAGE)).startswith(TABLE)]
    assert len(files) > 200
    assert {str(file): found for file in files if (found := refused_combinations(file))} == {}
    assert len(refused_combinations(PACKAGE / "recipe" / "limits.py")) >= 2


def test_a_combination_that_is_refused_elsewhere_is_noticed(tmp_path):
    file = tmp_path / "elsewhere.py"
    file.write_text(
        'raise UserError(f"layout.tensor={size}: no")\n'
        'raise UserError(f"fp8=true with {key}={value}: no")\n'
        'raise UserError("method=dpo with adapters: no")\n'
        'raise UserError(f"data.path={path}: no such file")\n'
        'raise ValueError(f"layout.tensor={size}")\n'
    )
    assert refused_combinations(file) == [
        "layout.tensor={}: no",
        "fp8=true with {}={}: no",
        "method=dpo with adapters: no",
    ]
