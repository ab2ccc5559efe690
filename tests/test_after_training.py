"""What `make demo` trains, by the six commands of scripts/README.md that lead to an endpoint, and in other formats."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import quantize
from deepspeed_recipes.export.evaluate import held_out
from deepspeed_recipes.export.quantize import measure, write
from deepspeed_recipes.export.serve import engines, environment
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json
from deepspeed_recipes.training import server
from deepspeed_recipes.training.model_folder import card, record
from tests import ROOT
from tests.launching import run
from tests.servers import NO_SERVING, serving

pytestmark = [pytest.mark.every, pytest.mark.timeout(7200)]
SECTION = "From data to endpoint"
PROMPTS = 50
NO_PACKED_KERNELS = pytest.mark.skipif(
    not engines.has_packed_kernels(),
    reason="vLLM's 4-bit kernels need AVX-512; ds-recipes serve says so (test_serve.py)",
)
RUN, SMALL, ADDRESS = "runs/first", "my-int8", "http://localhost:8000"
"""What the page calls them."""


def six_commands() -> list[list[str]]:
    """Return the page's commands, as words."""
    page = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    section = page.partition(f"## {SECTION}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^    python (scripts/.+)$", section, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


@pytest.fixture(scope="module")
def folder(launcher, tmp_path_factory):
    """Run the first command, which is that of `make demo`, and return the folder that it was typed in."""
    place = tmp_path_factory.mktemp("user")
    first, *_ = six_commands()
    assert first == ["scripts/launch.py", "tiny", "full", "--gpus", "2", "--output-dir", RUN]
    run([*launcher, *first[1:], "wandb.mode=disabled"], place, timeout=3600)
    return place


def typed(place: Path, words: list[str]) -> str:
    """Run a command as a user types it, and return what it prints."""
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=place, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param("", "vllm", marks=NO_SERVING),
        pytest.param("int8", "vllm", marks=NO_SERVING),
        pytest.param("int4", "vllm", marks=[NO_SERVING, NO_PACKED_KERNELS]),
        pytest.param("int4", "transformers", marks=NO_SERVING),
        ("", "transformers"),
        ("nf4", "transformers"),
    ],
)
def test_six_commands_lead_from_data_to_an_endpoint(kind, engine, folder):
    small = f"my-{kind or 'model'}"
    shutil.rmtree(folder / small, ignore_errors=True)

    def here(words, address=ADDRESS):
        """Return the page's words for this kind, this server, and few examples."""
        changed = [word.replace(SMALL, small).replace(ADDRESS, address) for word in words]
        return [*changed, "--limit", str(PROMPTS)] if words[0] == "scripts/evaluate.py" else changed

    _, export, serve, ask, evaluate, publish = map(here, six_commands())
    if kind:
        export[export.index("int8")] = kind
    else:
        at = export.index("--quantize")
        del export[at : at + 2]
    said = typed(folder, export)
    assert serve[0] == "scripts/serve.py"
    with serving(*serve[1:], "--engine", engine, folder=folder) as url:
        answer = typed(folder, here(ask, url)).strip()
        asked = [{"role": "user", "content": ask[-1]}]
        options = {"temperature": 0, "max_tokens": 96}
        assert answer == server.answers(server.connect(url), [asked], options)[0].message["content"].strip()
        assert json.loads(answer)["name"]
        typed(folder, here(evaluate, url))
    trained, written, served = read_json(RunFolder(folder / RUN).evaluation)["models"]
    print({"kind": kind, "engine": engine} | {one["name"]: one["score"] for one in (trained, written, served)})
    assert len(trained["values"]) == PROMPTS and trained["score"] > 0.9
    assert min(written["score"], served["score"]) >= trained["score"] - 0.02
    assert "README.md" in typed(folder, publish)
    if not kind:
        assert served["answers"] == written["answers"] == trained["answers"]
        return
    result = record.read(folder / small).results["quantization"]
    assert result["before"] > 0.9 and result["after"] >= result["before"] - 0.02, said
    assert result["same_token"] > 0.9 and result["bytes_after"] < 0.6 * result["bytes_before"]
    assert f"({kind})" in (folder / small / card.FILE).read_text()


@pytest.mark.skipif(not environment.has_llama_cpp(), reason="needs `make gguf`")
@pytest.mark.parametrize("kind", quantize.names("--gguf"))
def test_llama_cpp_answers_as_trained(kind, folder, tmp_path):
    words = [str(folder / RUN), "--gguf", kind, "--limit", str(PROMPTS), "--output", str(tmp_path / "file")]
    assert run_command("export", words) == 0
    result = record.read(tmp_path / "file").results["quantization"]
    assert result["before"] > 0.9 and result["after"] >= result["before"] - 0.02
    assert result["same_answer"] >= (1.0 if kind == "f16" else 0.95)
    assert result["bytes_after"] < {"f16": 0.6, "q8_0": 0.4, "q4_k_m": 0.35}[kind] * result["bytes_before"]
    assert f'Llama("model-{kind}.gguf"' in (tmp_path / "file" / card.FILE).read_text()
    assert run_command("publish", [str(tmp_path / "file"), "OWNER/NAME", "--dry-run"]) == 0


@pytest.mark.skipif(not environment.has_llama_cpp(), reason="needs `make gguf`")
def test_llama_cpp_has_the_loss_of_the_model_where_the_metric_is_the_loss():
    recipe = overrides.apply(pages.find("tiny", "full"), ["data.metric=loss"])
    with held_out.alone():
        known = held_out.read(recipe, None, None, 20)
        whole = Path(recipe.model.path)
        found = measure.losses(whole, known, print, lambda sequences: write.log_probabilities(whole, sequences))
    assert found.metric == "loss" and found.examples == 20 and found.same > 0.999
    assert found.after == pytest.approx(found.before, rel=1e-4), "the unrounded file"


@pytest.mark.skipif(environment.python("llmcompressor") is None, reason="needs the environment of `make serving`")
def test_an_fp8_model_answers_as_trained(folder, tmp_path):
    words = [str(folder / RUN), "--quantize", "fp8", "--limit", str(PROMPTS), "--output", str(tmp_path / "small")]
    assert run_command("export", words) == 0
    result = record.read(tmp_path / "small").results["quantization"]
    assert result["before"] > 0.9 and result["after"] >= result["before"] - 0.02
    config = read_json(tmp_path / "small" / "config.json")["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
