"""Computes the plain loop's result, and a run's distance from it; on ranks, since both need the stack."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..recipe.files import Json
from ..recipe.run_folder import RunFolder, read_jsonl, write_json
from ..training import distributed
from ..training.model import lora as adapters
from ..training.model_folder.base_model import ADAPTER
from . import plain, techniques
from .techniques import LORA, Kind, Technique

LOSS = 1e-5
"""Relative bound for a loss. fp32 sums in another order differ by less."""
NORM = 1e-4
"""Relative bound for a gradient norm; PyTorch's norms in fp32 and in fp64 differ by 8e-6."""
NEAR = 1e-2
"""Relative bound for both in bf16, which has 8 bits: 0.4 % per number."""
SEED = 42
"""Seed of the adapters, the same as a recipe's."""
WITHIN = 4
"""Allowed multiple of the plain loop's own rounding, on devices where that is more than the bounds above."""


def make(folder: str, kinds: list[Kind]) -> None:
    """Write the models, the data and the plain loop's results for `kinds` to `folder`.

    One process. `plain.train` runs on the ranks' device, in fp32; its distance from itself in fp64 is its rounding.
    """
    root = Path(folder)
    device = str(distributed.device()) if distributed.on_gpu() else "cpu"
    data = techniques.conversations(root / "train.jsonl")
    for kind in kinds:
        model = root / ("mixture" if kind == "mixture" else "dense")
        if not model.exists():
            techniques.random_qwen3(model, experts=kind == "mixture")
        used = Technique("", "", kind=kind).settings()
        options: Json = {"device": device}
        if kind in ("adapters", "qlora"):
            options["prepare"] = partial(_with_adapters, model if kind == "qlora" else None)
        records, weights = plain.train(model, data, used, **options)
        exact = plain.train(model, data, used, torch.float64, **options) if kind == "dense" else (records, weights)
        torch.save({"records": records, "weights": weights, "rounding": distance(exact, (records, weights))},
                   root / f"{kind}.pt")  # fmt: skip


def _with_adapters(quantized: Path | None, whole: PreTrainedModel) -> torch.nn.Module:
    """Return a model with adapters: `whole`, or the model in a folder, read again in 4 bits."""
    if quantized:
        in_4_bits = adapters.nf4(whole.dtype)
        whole = AutoModelForCausalLM.from_pretrained(quantized, dtype=whole.dtype, quantization_config=in_4_bits)
    # In evaluation bitsandbytes multiplies in bf16 on some CPUs.
    return adapters.add(whole.train(), LORA, SEED)


def distance(expected: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """Return the largest difference of two trainings: relative for losses and norms, by `plain.worst` for weights."""
    records = list(zip(found[0], expected[0], strict=True))
    apart = {key: max(abs(a[key] / b[key] - 1) for a, b in records) for key in ("loss", "grad_norm")}
    trained = {name: weight for name, weight in expected[1].items() if "lora_" in name} or expected[1]
    assert found[1].keys() >= trained.keys(), f"weights that are missing: {sorted(trained.keys() - found[1].keys())}"
    apart["weights"] = max(plain.worst(found[1][name].double(), one.double()) for name, one in trained.items())
    return apart


def compare(run: str, reference: str, kind: Kind, output: str) -> None:
    """Write the distance of a run from the plain loop, and the allowed distance; one process."""
    folder = RunFolder(Path(run))
    plain_loop = torch.load(reference, weights_only=True)
    rounding = torch.load(Path(reference).with_name("dense.pt"), weights_only=True)["rounding"]
    found = distance((plain_loop["records"], plain_loop["weights"]), (read_jsonl(folder.metrics), exported(folder)))
    if kind == "bf16":
        bounds = {"loss": NEAR, "grad_norm": NEAR}
    else:
        fixed = {"loss": LOSS, "grad_norm": NORM, "weights": 1.0}  # as `distance` measures each
        bounds = {key: max(bound, WITHIN * rounding[key]) for key, bound in fixed.items()}
    write_json(Path(output), {"found": {key: found[key] for key in bounds}, "allowed": bounds})


def exported(run: RunFolder) -> dict[str, torch.Tensor]:
    """Return the weights of a run's export as plain transformers loads them; an adapter's by their names in a model."""
    adapter = run.export / ADAPTER
    if not adapter.exists():
        whole: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(
            run.export, dtype=torch.float32
        ).state_dict()
        return whole
    weights = load_file(run.export / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): weight for name, weight in weights.items()}
