"""What planning knows of a model, looked up before it is computed: `python -m recipes.planning.trace` writes it down.

The decoders of the catalogue stand in `traces/`, a file per `model_type`; others are taken apart once (`dissect.py`,
which imports torch and transformers) and kept in the user's cache. Both are keyed by the version of transformers, since
another one may compute in another way.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recipes.planning.anatomy import Anatomy, Kind, Saved, way
from recipes.spec import pages
from recipes.spec.errors import UserError
from recipes.spec.recipe import Lora

TRACES = Path(__file__).parent / "traces"
USUAL = (Lora(), Lora(dropout=0.05), Lora(dora=True))
"""Adapters that are traced for the whole catalogue, where they are possible, beside those on the pages."""


def anatomy(config: Mapping[str, Any], lora: Lora | None = None) -> Anatomy:
    """Return a decoder's parts, and what its layers keep when all weights are trained, or adapters like `lora`.

    Milliseconds for the catalogue; seconds for what nobody has asked for before, most of them for imports.

    Args:
        config: as in a `config.json`; `model_type` and the dimensions are enough.
        lora: its rank and alpha do not matter.

    Raises:
        UserError: not a decoder that transformers knows, or one that these adapters cannot be added to.
    """
    name = key(config)
    files = [TRACES / f"{config.get('model_type')}.json", cache() / f"{name} {tracer()}.json"]
    found = [known for known in (_read(file).get(name) for file in files) if known]
    for known in found:
        if way(lora) in known.ends:
            return known
    from recipes.planning.dissect import dissect

    made = dissect(config, [None, lora] if lora else [None])
    for known in found:
        made = joined(made, known)
    _write(files[-1], {name: made})
    return made


def key(config: Mapping[str, Any]) -> str:
    """Return what a model is stored under: the version of transformers, and a digest of the configuration."""
    text = json.dumps(config, sort_keys=True, default=dict)
    return f"{version('transformers')} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def tracer() -> str:
    """Return a digest of the code that takes models apart: what an older version of it found is found again."""
    names = ("anatomy.py", "dissect.py", "fit.py", "weigh.py")
    sources = [Path(__file__).with_name(name).read_bytes() for name in names]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:8]


def cache() -> Path:
    """Return the folder for models that are not in the catalogue."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed-recipes" / "traces"


def joined(one: Anatomy, other: Anatomy) -> Anatomy:
    """Return a model's anatomy with all ways to train it that either knows."""
    kinds = tuple(
        replace(
            mine,
            adapters={**mine.adapters, **its.adapters},
            saved={**mine.saved, **its.saved},
            working={**mine.working, **its.working},
        )
        for mine, its in zip(one.kinds, other.kinds, strict=True)
    )
    return replace(one, kinds=kinds, ends={**one.ends, **other.ends}, loss={**one.loss, **other.loss})


def _read(file: Path) -> dict[str, Anatomy]:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return {name: from_dict(values) for name, values in stored.items()}
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # not there, or of another version of this project: it is made again


def _write(file: Path, anatomies: Mapping[str, Anatomy]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(to_dict(one))}" for name, one in anatomies.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    draft.replace(file)


def to_dict(anatomy: Anatomy) -> dict[str, Any]:
    """Return plain JSON types: of what is kept, the three numbers as a list."""

    def plain(items: list[tuple[str, Any]]) -> Any:
        values = dict(items)
        return [_number(value) for value in values.values()] if set(values) == _SAVED else values

    return asdict(anatomy, dict_factory=plain)


_SAVED = {"per_token", "per_pair", "fixed"}


def _number(value: float) -> float:
    """Return it without what solving equations leaves behind the last digit that means something."""
    short = round(value, 6)
    return int(short) if short == int(short) else short


def from_dict(values: Mapping[str, Any]) -> Anatomy:
    """Return what `to_dict` was made of."""
    kinds = [
        Kind(**kind | _saved(kind, "saved", "working") | {"linears": tuple(map(tuple, kind["linears"]))})
        for kind in values["kinds"]
    ]
    rest = {"kinds": tuple(kinds), "order": tuple(values["order"])}
    return Anatomy(**dict(values) | _saved(values, "ends", "loss") | rest)


def _saved(values: Mapping[str, Any], *fields: str) -> dict[str, dict[str, Saved]]:
    return {field: {name: Saved(*numbers) for name, numbers in values[field].items()} for field in fields}


def catalogue() -> Iterator[tuple[str, Mapping[str, Any], list[Lora]]]:
    """Yield every size of every page: its name, its configuration, and the adapters that are worth a trace."""
    for family in pages.families():
        module = pages.page(family)
        for size, model in module.SIZES.items():
            own = [getattr(module, variant)(size).lora for variant in pages.variants(module)]
            loras = {way(lora): lora for lora in (*USUAL, *own) if lora}
            yield f"{family}-{size}", model.config, list(loras.values())


def traced(config: Mapping[str, Any], loras: list[Lora]) -> Anatomy:
    """Return what `anatomy` would compute for all weights and those of `loras` that this model can have."""
    from recipes.planning.dissect import dissect

    made = dissect(config)
    for lora in loras:
        try:
            made = joined(made, dissect(config, [lora]))
        except UserError:
            continue  # adapters on fused experts have neither dropout nor magnitudes
    return made


def main(arguments: Sequence[str] = ()) -> None:
    """Trace what the catalogue has and `traces/` lacks, everything with `--again`, and drop what is in it no more."""
    files: dict[str, dict[str, Anatomy]] = {}
    for name, config, loras in catalogue():
        known = None if "--again" in arguments else _read(TRACES / f"{config['model_type']}.json").get(key(config))
        start = time.perf_counter()
        files.setdefault(config["model_type"], {})[key(config)] = known or traced(config, loras)
        if not known:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    for old in TRACES.glob("*.json"):
        old.unlink()
    for model_type, anatomies in files.items():
        _write(TRACES / f"{model_type}.json", anatomies)


if __name__ == "__main__":
    main(sys.argv[1:])
