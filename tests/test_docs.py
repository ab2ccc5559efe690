"""The documentation: every command in it parses, every file it names is there."""

import ast
import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from deepspeed_recipes.commands import (
    benchmark,
    certify,
    check,
    doctor,
    evaluate,
    export,
    generate,
    launch,
    plan,
    publish,
    report,
    resolve,
    serve,
    shrink,
    sweep,
)
from deepspeed_recipes.prove.techniques import TECHNIQUES
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.project import PACKAGE, SCRIPTS
from scripts.maintain.documents import documents
from tests import ROOT

PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".serving", ".stacks", "runs"} & set(path.relative_to(ROOT).parts)
)
README = ROOT / "README.md"
PARSERS = {
    "launch.py": launch,
    "plan.py": plan,
    "export.py": export,
    "generate.py": generate,
    "evaluate.py": evaluate,
    "serve.py": serve,
    "certify.py": certify,
    "publish.py": publish,
    "shrink.py": shrink,
    "benchmark.py": benchmark,
    "check_config.py": check,
    "resolve_config.py": resolve,
    "doctor.py": doctor,
    "report.py": report,
    "sweep.py": sweep,
}

EXAMPLES = {
    "MODEL": "src/deepspeed_recipes/samples/tiny_model",
    "FILE": "src/deepspeed_recipes/samples/extract/train.jsonl",
    "FILE.jsonl": "src/deepspeed_recipes/samples/extract/train.jsonl",
    "HELD_OUT.jsonl": "src/deepspeed_recipes/samples/extract/held_out.jsonl",
}
"""What the tests put in place of the words in capitals that the documents use."""
READERS_FILES = {
    **dict.fromkeys(
        ("llama3_lora_sft.yaml", "FILE.yaml"),
        "base_model: meta-llama/Llama-3.1-8B-Instruct\ndatasets:\n  - {path: FILE.jsonl, type: alpaca}\nadapter: lora\n"
        "learning_rate: 1e-4\nbf16: true\n",
    ),
    "reviews.csv": "review,stars\nVery good.,5\nQuite bad.,2\n" * 40,
    "questions.jsonl": "".join(f'{{"question": "Who is {one}?", "answer": "{one} is."}}\n' for one in range(80)),
    "my_code.py": re.findall(
        r"```python\n(# my_code.py\n.*?)```", (ROOT / "recipes/README.md").read_text("utf-8"), re.S
    )[0],
    "my_rewards.py": "def right(answer, example):\n    return 1\n\n\ndef short(answer, example):\n    return 0\n",
}
"""Files of a reader's own, which the documents name; the tests write them."""
OWN = re.compile(r"(?<=[=,])[A-Z_]+\w*(\.jsonl)?(?=,|$)")


def commands(text: str) -> list[list[str]]:
    """Return every `python scripts/...` and `ds-recipes` command of a text, comments and shell variables left out."""
    typed = re.sub(r"^(    )ds-recipes (\w+)", lambda found: f"{found[1]}{command(found[2])}", text, flags=re.MULTILINE)
    found = re.findall(r"python (scripts/\w+\.py[^\n`|]*)", typed)
    return [shlex.split(one.partition("  ")[0]) for one in found]


def command(name: str) -> str:
    """Return a command of `ds-recipes` as its script, or as it is where it has none."""
    return f"python scripts/{SCRIPTS[name]}.py" if name in SCRIPTS else f"ds-recipes {name}"


def documentation(path: Path) -> str:
    """Return a page's text, a notebook's, or a module's docstring."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        return "\n\n".join("".join(cell["source"]) for cell in cells)
    return text if path.suffix == ".md" else ast.get_docstring(ast.parse(text)) or ""


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DOCUMENTED = {
    shlex.join(command): command
    for path in [*PAGES, *NOTEBOOKS, *(ROOT / "recipes").glob("*.py"), *PACKAGE.glob("commands/**/*.py")]
    for command in commands(documentation(path))
}
"""Each documented command once, however many pages have it."""


def test_commands_are_found():
    assert len(PAGES) >= 5 and len(DOCUMENTED) >= 250


@pytest.mark.slow  # together a minute
@pytest.mark.parametrize("command", DOCUMENTED.values(), ids=DOCUMENTED)
def test_documented_commands_are_accepted(command, tmp_path, capsys):
    script, *arguments = command
    assert (ROOT / script).exists()
    name = Path(script).name
    if name == "launch.py" and not {"--list", "--resume", "--ray"} & set(arguments):
        if any(word.isupper() for word in arguments):
            return  # a form, not a command: RECIPE[-SIZE] VARIANT
        arguments = [OWN.sub(lambda form: EXAMPLES[form[0]], word) for word in arguments]
        for file, content in READERS_FILES.items():
            (tmp_path / file).write_text(content)
            arguments = [word.replace(file, str(tmp_path / file)) for word in arguments]
        # The model that stands for a reader's own has fewer positions than theirs.
        short = ["sequence_length=512"] if f"model.path={EXAMPLES['MODEL']}" in arguments else []
        dry = [] if "--from" in arguments else ["--dry-run"]  # a translation starts nothing
        if "--write" in arguments:
            arguments[-1] = str(tmp_path / arguments[-1])
        assert launch.main([*arguments, *short, *dry]) == 0, capsys.readouterr().err
        return
    if name == "plan.py":
        config = tmp_path / "config.json"
        config.write_text(json.dumps(pages.page("llama3").SIZES["8b"].config))
        arguments = [str(config) if word == "path/to/config.json" else word for word in arguments]
        written = [word for before, word in pairwise(arguments) if before == "--write"]
        arguments = [str(tmp_path / word) if word in written else word for word in arguments]
        named = {"--gpu", "--gpu-memory", "--which-gpu"} & set(arguments)
        here = [] if named else ["--gpu", "H100", "--gpus", "8"]
        assert plan.main([*arguments, *here]) == 0, capsys.readouterr().err
        return
    with pytest.raises(SystemExit) as end:
        PARSERS[name].main([*arguments, "--help"])
    assert end.value.code == 0


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", documentation(page)):
        assert (page.parent / target).exists(), target


def test_the_annotated_tree_names_what_exists():
    tree = README.read_text(encoding="utf-8").split("## What is where")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT if not line.startswith(" ") else folder
        place = folder / name
        assert place.exists() or name == "runs/", name
        folder = place if not line.startswith(" ") else folder


def test_the_table_of_techniques_has_each():
    """A range such as `zero0` to `zero3` stands for all between its ends."""
    table = (ROOT / "scripts/README.md").read_text(encoding="utf-8").split("| names for `--only` |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    for first, start, end in re.findall(r"`(\w+?)(\d)` to `\w+?(\d)`", " ".join(cells)):
        named |= {f"{first}{number}" for number in range(int(start), int(end))}
    assert named == {technique.name for technique in TECHNIQUES}


def test_the_readme_is_short_and_says_little_before_the_first_command():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(text.partition("    make demo")[0].split()) < 100
    assert text.index("source .venv/bin/activate") < text.index("\n    python scripts/")


def test_make_targets_of_the_documents_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"^    make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= targets


def test_no_forbidden_name_occurs():
    pattern = r"(^|[^a-z.])/(w[o]rk|f[a]rm)/|pyt[h]onhosted|pyp[i]\.|\.libr[a]ry/"
    done = subprocess.run(["git", "grep", "-nIE", pattern], cwd=ROOT, capture_output=True, text=True)
    assert not done.stdout


def test_generated_documents_are_what_the_code_says():
    found = documents.documents()
    assert len(found) >= 5
    for path, text in found.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run make docs"
