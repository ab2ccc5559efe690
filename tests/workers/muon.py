"""A run with Muon in fp32 throughout, which writes down the matrices that DeepSpeed has orthogonalised."""

from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

from deepspeed_recipes.recipe.run_folder import RunFolder, write_json
from deepspeed_recipes.training import run


def main(folder: str) -> None:
    """Train; a rank's file has the shape of each update, in order.

    DeepSpeed iterates in fp16 on CPUs that have it, whose rounding differs from that of other sums by 0.1 %.
    """
    shapes: list[list[int]] = []
    update = original_muon.muon_update

    def recorded(gradient, *arguments, **options):
        shapes.append(list(gradient.shape))
        return update(gradient, *arguments, **options)

    original_muon.ns_compute_dtype = lambda *_: torch.float32
    original_muon.muon_update = muon_optimizer.muon_update = recorded
    conclude = run.conclude

    def write(*arguments):
        write_json(path_of(folder, dist.get_rank()), shapes)
        conclude(*arguments)

    run.conclude = write
    run.main(folder)


def path_of(folder, rank: int):
    """Return where a rank writes."""
    return RunFolder(Path(folder)).path / f"muon-{rank}.json"
