"""The documents in configs/ agree with the files and the code."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scripts.maintain.documents.blocks import block
from tests.test_configs_run import CONFIGS, CUDA

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "configs" / "README.md").read_text()


def keys(config: dict, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from keys(value, (*path, name))
        else:
            yield ".".join((*path, name))


def test_the_table_of_combinations_agrees_with_the_launcher():
    table = block(README, "combinations")
    assert table.count("yes") >= 30 and table.count("\n") <= 4 * (table.partition("\n")[0].count("|") - 1)
    assert "| pipeline | yes | yes | [" in table and "| data | yes | yes | yes | yes | yes | yes | yes | yes |" in table


def test_the_decision_chart_agrees_with_the_planner():
    rows = block(README, "chart").splitlines()
    assert len(rows) == 2 + 15 and sum("GiB" in cell for row in rows for cell in row.split("|")) >= 30
    assert "`zero3" in rows[2 + 9] and rows[2 + 10].startswith("| 70B | lora | ")


def test_every_template_has_its_row_and_says_what_was_tested():
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)\.json` \|.*$", README, re.MULTILINE)}
    assert set(rows) == {path.stem for path in CONFIGS}
    for name, row in rows.items():
        assert row.rstrip(" |").endswith("loads" if name in CUDA else "4"), row


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_value_has_its_reason(path: Path):
    for key in keys(json.loads(path.read_text())):
        assert f"`{key}`" in README or (key.startswith("optimizer.params.") and "`optimizer.params.*`" in README), key


def test_the_diff_on_the_page_is_the_real_one():
    command = ["diff", "configs/zero2.json", "configs/zero2_offload.json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout in README


def test_accelerate_files_name_templates_that_exist():
    files = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
    assert len(files) == 8
    named = 0
    for file in files:
        content = yaml.safe_load(file.read_text())
        if content["distributed_type"] == "DEEPSPEED":
            template = ROOT / content["deepspeed_config"]["deepspeed_config_file"]
            stage = json.loads(template.read_text())["zero_optimization"]["stage"]
            assert content["deepspeed_config"]["zero3_init_flag"] == (stage == 3)
            named += 1
    assert named == 7
