"""The section with gradients and weights by layer, which shows layers that vanish, explode, or stop learning."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..page import Block, HeatMap, Note, Section, Table, number
from ..run_data import Row, RunData
from .curves import finite

MOST_CELLS = 3000
"""Maximum number of cells in a heat map, of 130 bytes each; longer runs show every n-th log, and the last."""
MAPS = {
    "grad_norm": "Gradient norm of each layer, before clipping (logarithmic)",
    "update_ratio": "Update as a share of the weights (logarithmic)",
}
FORMS = {"grad_norm": ".4g", "update_ratio": ".3g", "dead": ".2%"}
"""The values of a layer with their formats."""
MEANING = (
    "Dead: the share of weights with a gradient of exactly zero, because a unit is off or saturated for every token or "
    "because a token does not occur. An update is usually about a thousandth of the weights."
)

AT_FIRST = (
    "Step 1 of an adapter differs from all others: LoRA's B matrices begin at zero, so its A matrices have no gradient "
    "yet and count as dead, and B's first update is large compared with weights of which half are zero. That is as it "
    "should be."
)


def sections(run: RunData) -> tuple[Section, ...]:
    """Return the section, or nothing if the run did not measure its layers."""
    logged = [(at, row) for at, row in enumerate(run.metrics, 1) if _layers(row)]
    return (Section("Layers", tuple(_blocks(logged, run.recipe.lora is not None))),) if logged else ()


def _blocks(logged: list[tuple[int, Row]], adapters: bool) -> Iterator[Block]:
    yield Note(" ".join(_verdicts(logged)) or "No layer's gradient has vanished or exploded.")
    if adapters and logged[0][1]["step"] == 1:
        yield Note(AT_FIRST)
    names = tuple(dict.fromkeys(name for _, row in logged for name in _layers(row)))
    every = -(-len(logged) * len(names) // MOST_CELLS)
    kept = [row for at, (_, row) in enumerate(logged) if at % every == 0 or at == len(logged) - 1]
    for key, title in MAPS.items():
        values = ((name, (_layers(row).get(name, {}).get(key) for row in kept)) for name in names)
        rows = tuple((name, tuple(one if finite(one) and one > 0 else None for one in line)) for name, line in values)
        if any(value for _, values in rows for value in values):
            yield HeatMap(title, "step", tuple(row["step"] for row in kept), rows)
    at, last = logged[-1]
    head = ("layer", "gradient norm", "update / weights", "dead", "")
    numbers = tuple(
        (
            name,
            *(number(one.get(key), form, f"metrics.jsonl:{at}:layers:{name}:{key}") for key, form in FORMS.items()),
            str(one.get("verdict") or ""),
        )
        for name, one in _layers(last).items()
    )
    yield Table(head, numbers)
    yield Note(f"The table is of step {last['step']:,}. {MEANING}")


def _verdicts(logged: list[tuple[int, Row]]) -> Iterator[str]:
    """Yield a sentence for each problem with a layer's gradient: how often it occurred, and the first step."""
    still = [row["step"] for _, row in logged if all(one.get("grad_norm") == 0 for one in _layers(row).values())]
    if still:
        yield (
            f"The gradient of every layer is zero in {len(still)} of {len(logged)} logs, first at step {still[0]}: "
            "these updates taught the model nothing."
        )
    found: dict[tuple[str, str], list[int]] = {}
    for _, row in logged:
        for name, one in _layers(row).items():
            if one.get("verdict"):
                found.setdefault((str(one["verdict"]), name), []).append(row["step"])
    for (verdict, name), steps in found.items():
        yield f"{verdict.capitalize()} gradient in {name}: in {len(steps)} of {len(logged)} logs, first at {steps[0]}."


def _layers(row: Row) -> Mapping[str, Any]:
    found = row.get("layers")
    return {name: one for name, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}
