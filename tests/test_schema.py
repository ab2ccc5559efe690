"""The schemas that the linter reads: they are what DeepSpeed gives, and other versions are judged by the nearest."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest

from deepspeed_recipes.commands import main
from deepspeed_recipes.config import schema
from deepspeed_recipes.machine import software
from scripts.maintain.schema import derive, names
from scripts.maintain.schema.pydantic_types import type_of
from tests import ROOT
from tests.versions import has, needs

M = {"train_micro_batch_size_per_gpu": 1}
DERIVED = schema.file_of(schema.installed_version() or "")


@pytest.mark.skipif(not DERIVED.exists(), reason="no schema of the installed DeepSpeed ships")
def test_the_schema_is_what_deepspeed_reads():
    """Schemas are derived, never edited: `python -m scripts.maintain.schema.derive` writes the installed version's."""
    shipped, derived = schema.read(DERIVED), derive.derive()
    assert derived["root"] == shipped["root"]
    if has("torch>=2.13"):  # with which the parameters of torch's optimizers and schedules were tried
        assert derived == shipped


def test_the_oldest_and_the_newest_tested_deepspeed_have_a_schema():
    found = {file.name for file in schema.SCHEMAS.glob("*")}
    assert found == {f"deepspeed-{version}.json" for version in software.RANGES["deepspeed"]}
    for version in software.RANGES["deepspeed"]:
        assert schema.read(schema.file_of(version))["deepspeed"] == version


def test_an_older_schema_is_its_differences_from_the_newest():
    oldest, newest = (schema.read(schema.file_of(version)) for version in software.RANGES["deepspeed"])
    written = json.loads(schema.file_of(oldest["deepspeed"]).read_text())
    assert written["differs_from"] == newest["deepspeed"]
    assert written["differences"] == list(derive.differences(newest, oldest)) and oldest != newest


@pytest.mark.parametrize(
    ("installed", "judged_by"),
    [
        (None, "0.19.8"),
        ("0.19.8", "0.19.8"),
        ("0.19.8+cu130", "0.19.8"),
        ("0.19.0", "0.19.0"),
        ("0.18.9", "0.19.0"),
        ("0.19.3", "0.19.0"),
        ("0.19.4", "0.19.8"),
        ("0.19.9.dev1", "0.19.8"),
        ("0.20.1", "0.19.8"),
        ("1.0", "0.19.8"),
    ],
)
def test_a_version_without_a_schema_is_judged_by_the_nearest_and_one_warning_says_so(
    installed: str | None, judged_by: str, monkeypatch, capsys
):
    monkeypatch.setattr(schema, "installed_version", lambda: installed)
    monkeypatch.setattr(schema, "load", cache(schema.load.__wrapped__))
    monkeypatch.setattr(sys, "argv", ["ds-recipes", "check", str(ROOT / "configs" / "zero3.json")])
    assert main.main() == 0 and schema.load()["deepspeed"] == judged_by
    printed = capsys.readouterr().err.splitlines()
    if installed is None or installed.startswith(judged_by):
        assert printed == []
    else:
        (line,) = printed
        assert f"DeepSpeed {installed}:" in line and f"DeepSpeed {judged_by}." in line


@needs("deepspeed==0.19.8")
def test_what_cannot_be_derived_is_in_deepspeeds_source():
    import deepspeed

    folder = Path(deepspeed.__file__).parent
    for file, text in {**derive.READ_ELSEWHERE, **derive.OPEN}.values():
        assert text in (folder / file).read_text(), (file, text)


@needs("deepspeed==0.19.8")
def test_no_pydantic_section_is_forgotten():
    """The schema knows the fields of every config model that DeepSpeedConfig holds after reading."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    config = DeepSpeedConfig({**M, "weight_quantization": {}, "comms_logger": {}})
    held = [value for value in vars(config).values() if isinstance(value, DeepSpeedConfigModel)]
    known = json.dumps(schema.load()["root"])
    assert len(held) >= 8
    for model in held:
        for name, field in type(model).model_fields.items():
            assert f'"{field.alias or name}"' in known, (type(model).__name__, name)


@needs("deepspeed==0.19.8")
def test_values_fit_as_pydantic_says():
    """Compare the written-out type rules with pydantic itself, for every typed field of every section."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    from pydantic import TypeAdapter, ValidationError

    samples = [
        *derive.SAMPLES.values(),
        -1,
        2,
        1.0,
        0.5,
        1e9,
        1e300,
        "2",
        "2.0",
        "1e3",
        "yes",
        "OFF",
        "cpu",
        "inf",
    ]
    compared = 0
    models = (DeepSpeedZeroConfig, DeepSpeedBF16Config, ZenFlowConfig, DeepSpeedZeroOffloadOptimizerConfig)
    for model in models:
        for field in model.model_fields.values():
            kind = type_of(field.annotation, field.metadata)
            if "section" in json.dumps(kind):
                continue
            annotation = field.annotation
            for constraint in field.metadata:
                from typing import Annotated

                annotation = Annotated[annotation, constraint]
            adapter = TypeAdapter(annotation)
            for sample in samples:
                try:
                    adapter.validate_python(sample)
                    accepted = True
                except ValidationError:
                    accepted = False
                assert schema.fits(kind, sample) == accepted, (field, sample)
                compared += 1
    assert compared > 1000


@needs("deepspeed==0.19.8")
def test_muon_takes_what_the_engine_says():
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert set(names.MUON_HALVES) == {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
