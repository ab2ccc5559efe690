"""A run that records which weights have changed, after training and before its export; executed by every rank."""

import deepspeed
import torch
from peft.tuners.lora import LoraLayer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from deepspeed_recipes.recipe.run_folder import RunFolder, write_json
from deepspeed_recipes.training import distributed, export, run
from deepspeed_recipes.training.model_folder import base_model


def main(folder: str) -> None:
    """Train, and write down what became of frozen weights and adapters."""
    save = export.save

    def save_and_look(trainer, exported, outline):
        save(trainer, exported, outline)
        trained = trainer.model
        held = {"held": share_held(trained), "adapters_held": share_held(trained, frozen=False)}
        held |= {"layers": sorted({type(one).__name__ for one in trained.modules() if isinstance(one, LoraLayer)})}
        weights = whole_parameters(trainer.model)
        if distributed.is_first():
            unset_hf_deepspeed_config()  # or transformers would shard what it loads
            base = export.load_base(base_model.find(exported), exported, dtype=trainer.model.dtype)
            write_json(exported.parent / "changes.json", changes(weights, base) | held)

    export.save = save_and_look
    run.main(folder)


def share_held(model: torch.nn.Module, frozen: bool = True) -> float:
    """Return the share of the frozen weights' elements, or of the trained ones', that this rank holds between steps."""
    weights = [p for p in model.parameters() if p.requires_grad != frozen]
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in weights)
    return sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in weights) / whole


def whole_parameters(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return every parameter, gathered where ZeRO-3 has sharded it, and whether it is trained; a collective."""
    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters([p for p in parameters.values() if hasattr(p, "ds_id")]):
        return {name: (value.detach().clone(), value.requires_grad) for name, value in parameters.items()}


def changes(weights: dict[str, tuple[torch.Tensor, bool]], base: torch.nn.Module) -> dict[str, object]:
    """Return which frozen weights differ from the base model's, and the dtypes and largest values of the adapters."""
    frozen = {name: value for name, (value, trained) in weights.items() if not trained}
    adapters = {name: value for name, (value, trained) in weights.items() if trained}
    before = dict(base.named_parameters())
    plain = {name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name in frozen}
    assert plain.keys() == before.keys(), plain.keys() ^ before.keys()
    return {
        "changed": [name for name, ours in plain.items() if not same(frozen[ours], before[name])],
        "frozen": len(frozen),
        "dtypes": sorted({str(value.dtype) for value in adapters.values()}),
        "moved": all(value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name),
    }


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare bytes: packed 4-bit weights are stored as bf16, and some of them look like NaN, which equals nothing."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.detach().contiguous().view(torch.uint8))


def path_of(run_folder: RunFolder):
    """Return where `main` writes."""
    return run_folder.path / "changes.json"
