"""Run what `limits` refuses, experts spread in a pipeline, and say how many of them a rank holds."""

from recipes.training import experts, run


def main(folder: str) -> None:
    """Run `folder`; executed on every rank."""
    ready = run.report_grad_norm

    def told(engine):
        held = [len(p) for name, p in engine.module.named_parameters() if name.endswith("experts.down_proj")]
        print(f"AutoEP's layers {len(experts.layers(engine.module))}, experts in each of the others {held}", flush=True)
        ready(engine)

    run.report_grad_norm = told
    run.limits.check = lambda *_: None
    run.main(folder)
