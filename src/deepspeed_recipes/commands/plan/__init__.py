"""Predict which configurations fit, how fast they are, which one to choose, and why, before a GPU is rented.

    ds-recipes plan llama3-8b                                         # full fine-tuning on this machine's GPUs
    ds-recipes plan llama3-70b --method lora --gpu H100 --gpus 8
    ds-recipes plan path/to/config.json --gpu A100-80GB --gpus 8 --nodes 4 --sequence-length 8192
    ds-recipes plan llama3-8b --method qlora --gpu-memory 24 --explain
    ds-recipes plan qwen3-32b --gpu p5.48xlarge --nodes 2 --write plans/qwen3
    ds-recipes plan llama3-8b --method lora --gpu g6e.xlarge --tokens 100M       # hours and dollars
    ds-recipes plan llama3-8b --method dpo_lora --which-gpu --tokens 500M
    ds-recipes plan llama3-70b --gpu p5.48xlarge --tokens 2B --deadline 3d
    ds-recipes plan qwen3-8b --method qlora --gpu 4090 --longest
    ds-recipes plan --gpu 4090                                        # what fits, by method and size
    ds-recipes plan llama3-70b --gpu H100 --gpus 8 --serve 64x8k      # GPUs that vLLM needs for it

A plan is a file in configs/, a layout, a micro-batch size, and gradient checkpointing on or off. Plans that cannot run
are left out. A plan does not fit if it is likely to need more memory than the GPUs have. A plan is tight if some
published runs of its kind needed more memory than the GPUs have: it may run out of memory and is not recommended. Plans
are ranked by predicted tokens per second and GPU, and those that offload come last. A simpler plan is preferred if it
reaches 95 % of the speed of a more complex plan, or 90 % if the complex plan splits the model. `micro-batch` is the
sequences of a forward pass x passes per optimizer step. Planning needs neither a GPU nor the weights, and for a recipe
no network either.

--tokens, or data.path and epochs, adds every plan's hours, and dollars if the price is known: a dated list price for
cloud instances, or --price. --deadline finds the number of GPUs that finish in time, --which-gpu the cheapest and the
smallest hardware, and --longest the longest sequence. A method is any variant of the recipe; `ds-recipes launch --list
FAMILY` lists them.

key=value changes the recipe as in ds-recipes launch. The planner keeps every setting that you give
(deepspeed=zero3.json, layout.tensor=8, micro_batch_size=2, gradient_checkpointing=false, global_batch_size=128).
software=peft, trl, llama-factory or transformers-4 plans for that software instead of this project's.

Exit status: 0; 1 if no plan certainly fits (the table shows the nearest plans); 2 for a mistake on the command line, or
a deadline that no plan meets.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from ...planning import table
from ...planning.search import extremes, model_recipe, strategies, suggestions
from ...planning.search.plans import PlanRequest, SearchResult, Workload, in_words
from ...recipe import overrides
from ...recipe.compatibility import positions
from ...recipe.errors import UserError, cannot_write, counted
from ...recipe.project import program
from ...training.data import updates
from . import workload
from .options import check_file, parser, request_of, with_method

WIDTH = 160
"""Width of the widest table in characters, with hours and dollars."""


def main(words: Sequence[str] | None = None) -> int:
    """Print the plans, and return the exit status: 1 if no plan fits."""
    arguments = with_method(parser(__doc__).parse_intermixed_args(words))
    # What few answers need is imported where they do: half of the time of a short answer goes into imports.
    if arguments.model is None or arguments.which_gpu:
        from . import which_gpu

        return (which_gpu.answer if arguments.model else which_gpu.what_fits)(arguments, console())
    if arguments.serve:
        from . import serving

        return serving.answer(arguments, console())
    request = request_of(arguments)
    work = workload.workload(arguments, request.recipe, request.fixed)
    if arguments.price and work is None:
        raise UserError("--price needs an amount of training: add --tokens 500M, or data.path=... epochs=3.")
    if work:
        named = {name: price for name, price in work.prices.given.items() if name}
        if unused := next((name for name in named if name != request.cluster.instance), None):
            raise UserError(f"--price {unused}={named[unused]:g}: not the price of this hardware; give --gpu {unused}.")
        request = replace(request, document_length=work.document_length)
    result = answer(arguments, request, work)
    request = result.request
    if best := result.best:  # the file may fix sizes that were the planner's to choose
        sizes = {
            "per_device_train_batch_size": best.setup.micro_batch_size,
            "gradient_accumulation_steps": best.setup.gradient_accumulation_steps,
        }
        check_file(best.recipe, best.cluster.gpus, best.cluster.gpus_per_node, sizes)
    remark = model_recipe.remark(arguments.model)
    if arguments.json:
        found = table.as_json(result, work)
        print(json.dumps(found | {"model": found["model"] | {"remark": remark}}, indent=2))
    else:
        if remark:
            print(remark)
        remarks = _remarks(arguments, request, result, work)
        table.show(result, console(), arguments.explain, work, remarks)
        asked = any(suggestions.is_layout_key(key) for key in overrides.keys_of(arguments.overrides))
        if asked and (rank := suggestions.asked_compared(result)):
            print(f"\n{rank}")
    if result.best is None:
        print(f"{program('plan')}: {suggestions.sentence(result)}", file=sys.stderr)
        return 1
    if arguments.write:
        from . import files

        try:
            files.write(request, result.best, arguments.write)
        except OSError as error:
            reason = cannot_write(error, arguments.write) or f"{arguments.write}: cannot be written ({error.strerror})."
            raise UserError(f"--write {reason}") from None
    return 0


def _remarks(
    arguments: argparse.Namespace, request: PlanRequest, result: SearchResult, work: Workload | None
) -> Iterator[str]:
    """Yield remarks on the best plan: the length or deadline that was searched for, and what other methods reach."""
    if result.best is None:
        return
    for name in arguments.software:
        yield f"Memory and speed are those of software={name}; the command below starts this project's."
    if arguments.longest:
        length = request.recipe.sequence_length
        why = "to within about 6 %; with a longer one, the high end of the memory range would not fit"
        if length + extremes.STEP > positions(request.recipe.model.config):
            why = "the model has no more positions"
        elif not result.best.tier and not result.best.cluster.host_memory_gib:
            why += " without offloading, which counts if --host-memory is given"
        yield f"The longest sequence that fits has {length:,} tokens ({why})."
    if arguments.deadline and work:
        wanted, taken = workload.deadline(arguments.deadline), work.hours(result.best)
        slowest = taken * result.best.speed / result.best.speed_range[0]
        late = f", but up to {in_words(slowest)} within the range: take more GPUs to be safe" * (slowest > wanted)
        cluster = result.best.cluster
        gpus = f"{counted(cluster.gpus, 'GPU')} ({cluster.nodes} x {cluster.gpus_per_node})"
        least = f" on {arguments.nodes} nodes or more" if arguments.nodes > 1 else ""  # fewer were not tried
        yield f"The fewest GPUs that finish within {in_words(wanted)}{least}: {gpus}, in {in_words(taken)}{late}."
    known = work and (work.examples or result.best.recipe.packs)  # otherwise short examples make more steps
    if work and known and (steps := work.steps(result.best)) < updates.ENOUGH:
        made = f"{steps} step{'s' * (steps > 1)} of {result.best.recipe.global_batch_size} sequences"
        yield (
            f"{made} {'are' if steps > 1 else 'is'} too few to learn much from: use a smaller global_batch_size, more "
            "epochs, or a shorter sequence_length."
        )
    yield from suggestions.remarks(request, result.best)


def answer(arguments: argparse.Namespace, request: PlanRequest, work: Workload | None) -> SearchResult:
    """Return the plans for a request, or for one with more GPUs (--deadline) or longer sequences (--longest)."""
    if arguments.deadline:
        hours = workload.deadline(arguments.deadline)
        if arguments.longest:
            raise UserError("--deadline and --longest: give one of them.")
        if work is None:
            raise UserError("--deadline needs an amount of training: add --tokens 500M, or data.path=... epochs=3.")
        return extremes.in_time(request, work, hours, larger_nodes=arguments.gpus is None)
    return extremes.longest(request) if arguments.longest else strategies.search(request)


def console() -> Console:
    """Return the console for the table: as wide as the terminal, or as the widest table without a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
