"""Certify what servers answer for every family, in `served.json`; the table in scripts/README.md is made of it.

    python -m scripts.maintain.served FAMILY ... [--server vllm] [--form merged] [--again]

A family's draft is trained a few steps with all weights and with adapters (of an MoE model on its experts, too),
exported, and compared with the trained model by each server (`ds-recipes certify`). What --work holds is not trained
again, and what the file holds is not asked again. A family takes minutes, so name a few at a time.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from deepspeed_recipes.export.serve import environment
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Recipe
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_MODEL

from .calibration import MEASUREMENTS

FILE = MEASUREMENTS / "served.json"
LAUNCH = Path(__file__).parents[1] / "launch.py"
FORMS: dict[str, tuple[str, ...]] = {
    "full": ("full", "learning_rate=1e-3"),
    "lora": ("lora", "learning_rate=5e-3", "lora.target_parameters=none"),
    "merged": (),
    "experts": ("lora", "learning_rate=5e-3"),
    "experts_merged": (),
}
"""Each form's variant and overrides; the merged ones are made of the adapter before them."""
SERVERS: dict[str, tuple[str, ...]] = {"transformers": ("full", "lora", "merged", "experts", "experts_merged")}
SERVERS |= {"vllm": SERVERS["transformers"], "llama.cpp": ("full", "merged", "experts_merged")}
TITLES = {"full": "all weights", "lora": "LoRA", "merged": "LoRA merged"}
TITLES |= {"experts": "LoRA with experts", "experts_merged": "LoRA with experts, merged"}
SETTINGS = (
    *("max_steps=8", "sequence_length=128", "global_batch_size=8", "data.max_examples=400", "data.validation=none"),
    *("precision=fp32", "gradient_checkpointing=false", "tracking=none", "save_steps=0", "micro_batch_size=4"),
)
WIDTH = 128
"""Hidden size of a draft: four heads of 32, the narrowest that vLLM's attention computes."""
AS_RELEASED: dict[str, dict[str, int | str]] = {
    "deepseek": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},
    "lfm2": {"block_dim": WIDTH, "conv_dim": WIDTH},
    "minimax_m2": {"rotary_dim": WIDTH // 8, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""Values of a draft's config.json as the releases have them: the only compressed keys and values for which vLLM's CPU
kernels are compiled, and names that transformers reads no longer and vLLM still does."""
LAYERS = {"gemma3": 6, "gemma3_vision": 6, "smollm3": 4}
"""Layers of a draft, if not the usual number: llama.cpp takes every sixth of Gemma 3's for one with full attention, and
every fourth of SmolLM3's for one without rotary embedding."""


def main() -> None:
    """Train, export and certify the families of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", metavar="FAMILY")
    parser.add_argument("--work", type=Path, default=Path("runs/served"), help="keeps drafts, runs and merged models")
    parser.add_argument("--server", action="append", choices=SERVERS, help="default: all that are installed")
    parser.add_argument("--form", action="append", choices=FORMS, help="default: all")
    parser.add_argument("--again", action="store_true", help="ask again what the file holds")
    options = parser.parse_args()
    installed = {"vllm": environment.python("vllm"), "llama.cpp": environment.has_llama_cpp(), "transformers": True}
    for family in options.families:
        recipe = pages.find(f"{family}-{next(iter(pages.page(family).SIZES))}", "lora")
        for form in options.form or FORMS:
            if form.startswith("experts") and not (recipe.lora and recipe.lora.target_parameters):
                continue
            for server in options.server or filter(installed.get, SERVERS):
                known = read_json(FILE).get(family, {}).get(form, {})
                if form not in SERVERS[server] or (server in known and not options.again):
                    continue
                found = _asked(recipe, form, server, options.work.resolve() / family)
                print(f"{family} {form} {server}: {found}", flush=True)
                results = read_json(FILE)  # another process may have added a family
                results.setdefault(family, {}).setdefault(form, {})[server] = found
                write_json(FILE, dict(sorted(results.items())))


def _asked(recipe: Recipe, form: str, server: str, place: Path) -> dict[str, Any]:
    """Return how a server's answers compare: the verdict, the difference and its bound in nats, and the version."""
    from deepspeed_recipes.commands.certify import certificate_of
    from deepspeed_recipes.export import certificate

    found: dict[str, Any] = {"version": environment.titled(server), "date": date.today().isoformat()}
    try:
        folder = _exported(recipe, form, place)
        result = certificate_of(folder, "none" if server == "transformers" else server)
    except UserError as error:
        return found | {"verdict": "refused", "why": str(error).splitlines()[0].replace(f"{place}/", "")}
    trained, base = certificate.read(folder), certificate.read(_base(recipe, place))
    changed = certificate.compare(trained, base["texts"], folder).difference
    found |= {"verdict": "agrees" if result.agrees else "differs", "bound": result.bound}
    found |= {"difference": float(f"{result.difference:.2g}"), "training": float(f"{changed:.2g}")}
    return found if result.agrees else found | {"why": "; ".join(result.causes)}


def _base(recipe: Recipe, place: Path) -> Path:
    """Return the draft that is trained, with its own answers in `expected.json`."""
    folder = place / "base"
    if folder.exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from deepspeed_recipes.training import export
    from deepspeed_recipes.training.model import draft, heads
    from deepspeed_recipes.training.model_folder import expected

    written = place / "unfinished"
    if recipe.family == "tiny":
        export.write(Path(TINY_MODEL), written, merge=False)
    else:
        layers = LAYERS.get(recipe.family, Draft().layers)
        small = Draft(enabled=True, hidden_size=WIDTH, layers=layers)
        draft.write(replace(recipe, draft=small), written, torch.float32)
        config = AutoConfig.from_pretrained(written)
        if changes := AS_RELEASED.get(recipe.family):
            kept = {name: value for name, value in config.to_dict().items() if name != "qk_head_dim"}
            config = type(config)(**kept | changes)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(written)
    model, examples = export.load(written).eval(), expected.sequences(export.load_tokenizer(written))
    answers = expected.measured(lambda tokens: heads.outputs(model(input_ids=tokens)), examples)
    expected.write(written, examples, model.dtype, answers)
    written.rename(folder)
    return folder


def _exported(recipe: Recipe, form: str, place: Path) -> Path:
    """Return the export of a form, which is trained or merged unless `place` has it.

    Raises:
        UserError: it cannot be trained or merged.
    """
    if not FORMS[form]:
        folder = place / form
        if not folder.exists():
            from deepspeed_recipes.training import export

            before = list(FORMS)[list(FORMS).index(form) - 1]
            try:
                export.write(_exported(recipe, before, place), folder, merge=True)
            except RuntimeError as error:
                raise UserError(f"export --merge: {error}") from error
        return folder
    run, (variant, *settings) = place / "runs" / form, FORMS[form]
    if not (run / "export").exists():
        words = [sys.executable, str(LAUNCH), f"{recipe.family}-{recipe.size}", variant, "--gpus", "1"]
        words += ["--output-dir", str(run), f"model.path={_base(recipe, place)}", *settings, *SETTINGS]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not (run / "export").exists():
            raise UserError(f"not trained: {[line for line in done.stdout.splitlines() if line.strip()][-1][:300]}")
    return run / "export"


def table(results: Mapping[str, Any]) -> str:
    """Return the table: a family's differences by server and form, and notes for what differs or is refused."""
    columns = [(server, form) for server, forms in SERVERS.items() for form in forms]
    lines = [f"| family | {' | '.join(f'{server}, {TITLES[form]}' for server, form in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    notes: dict[str, int] = {}
    for family, found in results.items():
        cells = []
        for server, form in columns:
            if (one := found.get(form, {}).get(server)) is None:
                cells.append("-")
            elif one["verdict"] == "agrees":
                cells.append(f"{one['difference']:.0e}" if one["difference"] else "0")
            else:
                why = re.sub(r"http://[\d.:]+", "", re.sub(r"runs/\w+/export", "ADAPTER", one["why"]))
                why = why.partition(" The available parameters")[0] or "the folder shows no cause"  # in any order
                number = notes.setdefault(why, len(notes) + 1)
                cells.append(f"{'**differs**' if one['verdict'] == 'differs' else 'no'} ({number})")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    every = [one for found in results.values() for form in found.values() for one in form.values()]
    numbered = [f"{number}. {why}" for why, number in notes.items()]
    missing = sorted(set(pages.families()) - set(results))
    versions = ", ".join(sorted({one["version"] for one in every}))
    least = min((one["training"] for one in every if "training" in one), default=0.0)
    about = [
        f"With {versions}, on a CPU in fp32. `-`: not run, or no such form.",
        f"Training had changed the answers by {least:.1g} nats and more.",
        f"Not run: {', '.join(missing)}." if missing else "",
    ]
    return "\n".join([*lines, "", *numbered, *([""] if numbered else []), *filter(None, about), ""])


if __name__ == "__main__":
    main()
