"""What can be said against a run before it starts: its DeepSpeed file's findings, and a layout that cannot run."""

from pathlib import Path

from recipes.spec import limits
from recipes.spec.errors import UserError
from recipes.spec.layout import bubble, gradient_accumulation_steps
from recipes.spec.recipe import Recipe
from recipes.training import preflight
from recipes.zero_config import lint
from recipes.zero_config.read import Unreadable
from recipes.zero_config.sharding import sharding


def check_config(recipe: Recipe, ranks: int) -> None:
    """Lint the DeepSpeed configuration for this run: warnings are shown, errors stop it.

    Raises:
        UserError: names the key, the line, the value and the fix.
    """
    local = Path(recipe.model.path, "config.json")
    try:
        findings = lint.lint(
            recipe.deepspeed,
            world_size=ranks,
            model=local if local.exists() else dict(recipe.model.config) or None,
            lora=recipe.lora is not None,
        )
    except Unreadable as error:
        raise UserError(f"deepspeed={recipe.deepspeed}: {error}") from error
    lines = [lint.describe(finding, recipe.deepspeed) for finding in findings]
    errors = [line for line, finding in zip(lines, findings, strict=True) if finding.severity == "error"]
    if errors:
        more = f"\n({len(errors) - 1} more; check_config.py shows them)" if len(errors) > 1 else ""
        raise UserError(errors[0] + more)
    for line in lines:
        print(line, flush=True)


def check_layout(recipe: Recipe, ranks: int) -> None:
    """Refuse a layout that cannot run, and say when a pipeline waits more than it has to.

    Raises:
        UserError: names the sizes, the reason and the nearest that can run.
    """
    limits.check(preflight.with_dimensions(recipe), ranks, sharding(recipe.deepspeed))
    stages, micro_batches = recipe.layout.pipeline, gradient_accumulation_steps(recipe, ranks)
    if stages > 1 and micro_batches < 4 * stages:
        print(
            f"layout.pipeline={stages}: with {micro_batches} micro-batches per step the stages wait "
            f"{bubble(stages, micro_batches):.0%} of the time; with {4 * stages}, a larger global_batch_size or a "
            f"smaller micro_batch_size, {bubble(stages, 4 * stages):.0%}.",
            flush=True,
        )
