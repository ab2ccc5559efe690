"""Runs what `limits` refuses, expert parallelism in a pipeline, and reports how many experts a rank holds."""

from deepspeed_recipes.training import run, upstream
from deepspeed_recipes.training.parallel import expert


def main(folder: str) -> None:
    """Run `folder`; executed on every rank."""
    ready = upstream.remember_gradient_norm

    def told(engine):
        held = [len(p) for name, p in engine.module.named_parameters() if name.endswith("experts.down_proj")]
        print(f"AutoEP's layers {len(expert.layers(engine.module))}, experts in each of the others {held}", flush=True)
        ready(engine)

    upstream.remember_gradient_norm = told
    run.limits.check = lambda *_: None
    run.main(folder)
