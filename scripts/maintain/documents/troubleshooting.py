"""Generates configs/TROUBLESHOOTING.md from the linter's rules."""

from deepspeed_recipes.config.rule import COSTS, FAILS_LATER, REJECTED, WRONG, Rule
from deepspeed_recipes.config.rules import RULES

HEAD = """# Troubleshooting DeepSpeed configurations

Search this page for your error message, or let the linter find the cause in your file: `python scripts/check_config.py
my_config.json` (`--fix` applies the safe fixes and shows the diff). This page is generated from the linter's rules
(`make docs`).
"""
CHAPTERS = (
    (REJECTED, "DeepSpeed refuses the config"),
    (FAILS_LATER, "The config loads, and the run stops"),
    (WRONG, "The run continues, but not as configured"),
    (COSTS, "The run works as configured, but wastes time or memory"),
)


def text() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for kind, title in CHAPTERS:
        rows = [_row(rule) for rule in RULES if rule.kind == kind]
        parts.append("\n".join([f"## {title}", "", "| symptom | cause | fix | rule |", "|---|---|---|---|", *rows]))
    return "\n".join(f"{part}\n" for part in parts).rstrip("\n") + "\n"


def _row(rule: Rule) -> str:
    cells = (rule.symptom, rule.cause, rule.fix, f"`{rule.id}` ({rule.severity})")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
