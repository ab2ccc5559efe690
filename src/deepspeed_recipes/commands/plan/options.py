"""The command line of `ds-recipes plan`, and its conversion to a request."""

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from ...planning.cost.training_setup import KNOWN
from ...planning.hardware import machine_file
from ...planning.hardware.cluster import Cluster, cluster, of_cpus, this_machine, with_measurements
from ...planning.hardware.machine_file import CPU
from ...planning.search import forecast, model_recipe, plans, strategies
from ...planning.search.plans import PlanRequest
from ...recipe import limits, overrides
from ...recipe.errors import UserError
from ...recipe.project import CONFIGS
from ...recipe.recipe import Layout, Recipe
from ..main import Parser

NODE = 16
"""Largest number of GPUs in a node."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return the command line's parser; `about` is the text of its help."""
    result = Parser("plan", about)
    result.add_argument(
        "model",
        nargs="?",
        help="RECIPE[-SIZE] (also a page's path), a Hub id, or the path to a config.json or its folder; without one, "
        "what fits on the hardware",
    )
    result.add_argument(
        "overrides",
        nargs="*",
        type=overrides.word,
        default=[],
        metavar="[VARIANT] key=value",
        help="full (default), lora, qlora or another variant, and changes of the recipe, as in ds-recipes launch",
    )
    result.add_argument("--method", metavar="VARIANT", help="another way to name the variant")
    result.add_argument("--gpus", type=int, metavar="N", help="GPUs per node")
    result.add_argument("--nodes", type=int, default=1, metavar="M", help="nodes (default 1)")
    result.add_argument("--gpu", metavar="NAME", help="H100, A100-80GB, p5.48xlarge, cpu ... (default: this machine)")
    result.add_argument("--gpu-memory", type=_gib, metavar="GIB", help="memory of one GPU, instead of --gpu")
    result.add_argument(
        "--machine", type=Path, metavar="FILE", help="rates of such a node, written there by doctor --measure FILE"
    )
    result.add_argument(
        "--host-memory",
        type=_gib,
        metavar="GIB",
        help="host memory of one node (0: unknown, not checked; default: a desktop's or the instance's, or unknown)",
    )
    result.add_argument("--nvme", type=_gib, metavar="GIB", help="local drives of one node (default: none)")
    result.add_argument(
        "--network", type=float, metavar="GBITS", help="Gbit/s between nodes (default: the usual rate for the GPU)"
    )
    result.add_argument(
        "--sequence-length", type=_length, metavar="S", help="in tokens, 4096 or 4k (default: the recipe's)"
    )
    result.add_argument(
        "--tokens", metavar="N", help="tokens to train, such as 500M, for each plan's hours (or give data.path)"
    )
    result.add_argument("--examples", metavar="N", help="examples to train, such as 50k, with --example-tokens")
    result.add_argument("--example-tokens", metavar="N", help="tokens of an example on average, such as 500")
    result.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="DOLLARS",
        help="price of a node per hour; also INSTANCE=DOLLARS",
    )
    result.add_argument("--deadline", metavar="8h", help="find the number of GPUs that train the tokens in this time")
    result.add_argument("--which-gpu", action="store_true", help="find the smallest and the cheapest hardware")
    result.add_argument("--longest", action="store_true", help="find the longest sequence that fits")
    result.add_argument("--serve", metavar="16x8k", help="what vLLM needs for 16 requests of 8k tokens at once")
    result.add_argument("--json", action="store_true", help="print the plans as JSON")
    result.add_argument(
        "--explain", action="store_true", help="give reasons for every plan, and show plans that do not fit"
    )
    result.add_argument("--write", type=Path, metavar="DIR", help="write the best plan's DeepSpeed JSON and launch.sh")
    return result


def _gib(text: str) -> float:
    """Return GiB from `64`, `64G`, `64GB` or `64 GiB`, which people use with the same meaning."""
    number = re.fullmatch(r"([-+]?[0-9.]+(?:e[0-9]+)?)\s*(?:g|gb|gib)?", text.strip().lower())
    try:
        size = float(number[1] if number else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a size in GiB, such as 64") from None
    if 2**32 <= size < math.inf:  # nan and infinity are refused later, together with negative sizes
        raise argparse.ArgumentTypeError(f"{text[:40]} is more memory than any machine has; write GiB, such as 64")
    return size


def _length(text: str) -> int:
    """Return tokens from `4096` or `4k`; k is 1,024."""
    number = re.fullmatch(r"([-+]?[0-9]+)\s*(k?)", text.strip().lower().replace("_", ""))
    if number is None:
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens, such as 4096 or 4k")
    return int(number[1]) * (1024 if number[2] else 1)


def with_method(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the command line with the variant as its `method`, given as the second word or with --method.

    `software=NAME`, which is not a setting of the recipe, becomes `software`.
    """
    words = [word for word in arguments.overrides if "=" not in word]
    names = [*words, *([arguments.method] if arguments.method else [])]
    if len(set(names)) > 1:
        raise UserError(f"{' and '.join(names)}: name one variant; settings are written key=value.")
    software = {change.partition("=")[2]: change for change in arguments.overrides if change.startswith("software=")}
    for name in software:
        if name not in KNOWN:
            raise UserError(f"software={name}: unknown; choose from {', '.join(KNOWN)}, or leave it out for ours.")
    if len(software) > 1:
        raise UserError(f"{' and '.join(software.values())}: a plan is for one software; give one of them.")
    changes = [change for change in arguments.overrides if change not in words and not change.startswith("software=")]
    found = {"overrides": changes, "method": names[0] if names else "full", "software": list(software)}
    return argparse.Namespace(**vars(arguments) | found)


def check_file(recipe: Recipe, ranks: int | None, ranks_each: int, sizes: Mapping[str, object]) -> None:
    """Refuse a DeepSpeed file with errors, or with values that contradict the recipe or the sizes that are known."""
    if recipe.deepspeed in os.listdir(CONFIGS):
        return
    from ...config import lint  # with all rules; files in configs/ need none
    from ...launching import preflight

    if error := lint.first_error(preflight.findings_of(recipe, ranks, ranks_each, sizes), recipe.deepspeed):
        raise UserError(error)


def request_of(arguments: argparse.Namespace) -> PlanRequest:
    """Return the request from the command line."""
    if arguments.gpus is not None and arguments.gpus > NODE:
        raise UserError(
            f"--gpus {arguments.gpus}: counts the GPUs of one node, at most {NODE}; for {arguments.gpus} GPUs in total "
            f"write, for instance, --gpus 8 --nodes {max(2, arguments.gpus // 8)}."
        )
    recipe, keys = recipe_of(arguments)
    hardware = hardware_of(arguments)
    if "deepspeed" in keys:
        file = strategies.template(recipe.deepspeed, hardware)  # refuses a name without a file
        # Planning chooses the accumulation and the layout, which follows the file's block for experts.
        layout = replace(recipe.layout, expert=max(recipe.layout.expert, 1 + file.has_expert_block))
        ranks = None if arguments.deadline else hardware.gpus
        sizes = {"per_device_train_batch_size": recipe.micro_batch_size} if "micro_batch_size" in keys else {}
        check_file(replace(recipe, layout=layout), ranks, hardware.gpus_per_node, sizes)
    if not arguments.deadline:  # --deadline searches for as many GPUs as a layout needs
        # Sizes that are impossible whatever the planner chooses for the others.
        given = {name: size for name, size in asdict(recipe.layout).items() if f"layout.{name}" in keys}
        file = strategies.template(recipe.deepspeed if "deepspeed" in keys else "zero1.json", hardware)
        micro = recipe.method.least_micro_batch
        batch = math.lcm(hardware.gpus * micro, recipe.global_batch_size)  # also a multiple of GRPO's groups of answers
        alone = replace(recipe, layout=Layout(**given), micro_batch_size=micro, global_batch_size=batch)
        limits.check(alone, hardware.gpus, file)
    request = strategies.plan_request(recipe, hardware, keys)
    if tower := model_recipe.tower_parameters(arguments.model):
        request = replace(request, profile=replace(request.profile, tower_parameters=tower))
    for name in arguments.software:
        software = KNOWN[name]
        if recipe.model.quantization == "none":  # PEFT prepares 4-bit models only
            software = replace(software, frozen_fp32=False, fp32_activations=False)
        request = replace(request, software=software)
    return request


def hardware_of(arguments: argparse.Namespace) -> Cluster:
    """Return the machines that the command line names."""
    on_cpu = (arguments.gpu or "").upper() == CPU
    if arguments.gpu_memory is None and (on_cpu or not arguments.gpu):
        found = machine_file.read(arguments.machine) if arguments.machine else forecast.cpus_here()
        measured_cpu = found is not None and found.device == CPU
        if on_cpu and not measured_cpu:
            where = f"{found.file} was measured on {found.device}" if found else "this machine's CPU was not measured"
            raise UserError(f"--gpu cpu: {where}, and plans for CPUs need its rates; run ds-recipes doctor --measure.")
        if found and measured_cpu and (on_cpu or arguments.machine or this_machine() is None):
            for option, given in (("nodes", arguments.nodes != 1), ("network", arguments.network)):
                if given:
                    raise UserError(f"--{option}: CPU ranks are planned on a single machine; leave it out.")
            return plans.corrected(of_cpus(found, arguments.gpus))
    gpu, gpus = arguments.gpu, arguments.gpus
    if arguments.machine and gpu is None and arguments.gpu_memory is None:
        measured = machine_file.read(arguments.machine)
        gpu, gpus = measured.device, gpus or measured.ranks
    hardware = cluster(gpu, gpus, arguments.nodes, arguments.gpu_memory, arguments.host_memory, arguments.nvme)
    named = arguments.gpu is not None
    hardware = with_measurements(hardware, arguments.machine, named, lambda line: print(line, file=sys.stderr))
    hardware = plans.corrected(hardware)
    if arguments.network is None:
        return hardware
    if not 0 < arguments.network < math.inf:
        raise UserError(f"--network {arguments.network:g}: must be above 0, in Gbit/s of one node.")
    if arguments.nodes == 1 and not arguments.deadline:  # which searches for the number of nodes
        raise UserError(f"--network {arguments.network:g}: a single node uses none; add --nodes M.")
    machine = hardware.machine and replace(hardware.machine, network_gbs=0.0)  # what was measured does not count
    return replace(hardware, network_gbs=arguments.network / 8, machine=machine)


def recipe_of(arguments: argparse.Namespace) -> tuple[Recipe, frozenset[str]]:
    """Return the recipe with the user's settings, and the keys that the planner keeps: the user's and the variant's."""
    page = model_recipe.find(arguments.model, arguments.method)
    changes = [change for change in arguments.overrides if change != "deepspeed=auto"]  # planning does that anyway
    keys = [change.partition("=")[0] for change in changes]
    if arguments.sequence_length is not None:
        if "sequence_length" in keys:
            raise UserError(f"--sequence-length {arguments.sequence_length} and sequence_length=...: give one of them.")
        changes.append(f"sequence_length={arguments.sequence_length}")
    if arguments.longest and any(change.startswith("sequence_length=") for change in changes):
        raise UserError("--longest searches for the sequence length; leave your sequence length out.")
    if "model.path" in keys:
        raise UserError("model.path=...: give the model as the first word, a Hub id or the path to its config.json.")
    recipe = overrides.apply(page, changes)
    changed = (method := model_recipe.method_of(recipe)) != model_recipe.method_of(page)
    if changed and page.method.name == "sft":  # others have no page of their own for each kind of adapters
        raise UserError(
            f"--method {arguments.method}: your key=value settings change the method to {method}; write --method "
            f"{method}."
        )
    return recipe, frozenset(keys) | model_recipe.pinned(page)
