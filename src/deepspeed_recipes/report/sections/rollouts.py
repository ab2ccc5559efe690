"""The section with the best and worst training answers of a run that learns from its own answers."""

from collections.abc import Iterator

from ..document import Block, Cell, Marked, Section, Table, number
from ..run_data import Row, RunData

SHOWN = 3
"""Number of logged steps whose answers are shown: the first, one in the middle, and the last."""


def sections(run: RunData) -> Iterator[Section]:
    """Yield the section if the run has such answers."""
    if run.rollouts:
        yield Section("Best and worst answers in training", tuple(_blocks(run.rollouts)))


def _blocks(rows: tuple[Row, ...]) -> Iterator[Block]:
    steps = sorted({row["step"] for row in rows})
    chosen = {steps[round(part * (len(steps) - 1) / (SHOWN - 1))] for part in range(SHOWN)}
    for row in rows:
        if row["step"] in chosen:
            yield Marked(f"Step {row['step']}, {row['which']}: {_reward(row)}. Prompt", ((str(row["prompt"]), ""),))
            yield Marked("answer", ((str(row["answer"]), ""),))
    cells = tuple(
        (_cell(row, "step", ",d", at), row["which"], _cell(row, "reward", ".3f", at)) for at, row in enumerate(rows, 1)
    )
    yield Table(("step", "which", "reward"), cells, folded="Rewards of the best and worst answers: rollouts.jsonl")


def _cell(row: Row, key: str, form: str, at: int) -> Cell:
    return number(row[key], form, f"rollouts.jsonl:{at}:{key}")


def _reward(row: Row) -> str:
    by_function = row["rewards"]
    each = ", ".join(f"{name} {value:.3g}" for name, value in by_function.items()) if len(by_function) > 1 else ""
    return f"reward {row['reward']:.3g}" + (f" ({each})" if each else "")
