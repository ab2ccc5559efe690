"""Writes a smaller copy of a trained model, compares it with the original, and refuses too large a loss."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...machine import children
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.run_folder import read_json
from ...training.model_folder import base_model, complete, record
from ..serve import engines, environment, served
from . import KINDS, UNROUNDED, Kind

if TYPE_CHECKING:
    from ..evaluate.held_out import HeldOut

COMPRESS, CONVERT, ANSWER = (
    Path(__file__).with_name(name) for name in ("compress.py", "gguf_convert.py", "gguf_answer.py")
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
"""Files that a quantised model has its own version of; all others in the folder are copied."""
LEFT = "bitsandbytes leaves experts, which one tensor holds, in 16 bits"
EXPERTS = {
    "nf4": LEFT,
    "int8-bitsandbytes": LEFT,
    "int8": "transformers 5.22, which compares the copy, does not load experts in int8 again",
}
"""Kinds that cannot hold experts, with the reason."""
MIB = 2**20


def check(source: Path, output: Path, kind: Kind) -> None:
    """Refuse a model of which no such copy can be written, before anything is loaded."""
    complete.check(source, output)
    adapter = (source / base_model.ADAPTER).exists()
    if not adapter and not (source / "config.json").exists():
        raise UserError(f"{source}: not a model folder (it holds neither config.json nor {base_model.ADAPTER}).")
    if base_model.head_of(source) == "vision":
        raise UserError(f"{source}: {kind.option} is not for models that read images; it is tested with text alone.")
    if returned := {"scores": "scores", "none": "embeddings"}.get(base_model.head_of(source)):
        raise UserError(f"{source}: {kind.option} is for models that write text, and this model returns {returned}.")
    if not adapter and "quantization_config" in base_model.config_of(source):
        raise UserError(f"{source}: is already quantised; use {kind.option} on the model that it was made from.")
    if kind.name in EXPERTS and engines.has_experts(served.whole(source)):
        raise UserError(
            f"{kind.typed}: {source} is an MoE model, and {EXPERTS[kind.name]}; use --quantize int4, fp8 or fp8-block, "
            "or --gguf q8_0."
        )
    if kind.quantizer == "llm-compressor":
        try:
            environment.require("llmcompressor", kind.typed)
        except UserError as error:
            here = [one for one in KINDS.values() if one.quantizer in ("bitsandbytes", "deepspeed-recipes")]
            without = ", ".join(f"{one.name} ({one.title}; for {one.loads_in})" for one in here)
            raise UserError(f"{error}\nWithout that environment, --quantize writes {without}.") from None
    elif kind.quantizer == "llama.cpp":
        environment.require_llama_cpp(kind.typed)


def write(
    source: Path, output: Path, kind: Kind, held_out: "HeldOut | None", allowed: float, say: Callable[[str], None]
) -> list[str]:
    """Write a smaller copy of the model in `source`, completely or not at all.

    An adapter is merged first, and a model that cannot be converted or has lost more than `allowed` is refused. Returns
    lines to print: the sizes, and the comparison with the original on the examples of `held_out`, if they are known.
    `allowed` is in percentage points of the metric, or in percent if the metric is the loss.
    """
    from ...training import export
    from ...training.model_folder import expected
    from . import measure

    output.parent.mkdir(parents=True, exist_ok=True)
    with children.scratch(output.name + ".", inside=output.parent) as place:
        whole, part = source, place / "part"
        if (source / base_model.ADAPTER).exists():
            whole = place / "merged"
            export.write(source, whole, merge=True)
        if (whole / base_model.PROVENANCE).exists():
            held = read_json(whole / base_model.PROVENANCE)
            if left := [*held["parts"], *held.get("further_token", ())]:
                say(f"of the text part alone, without {', '.join(left)}")
            trained = place / "trained"  # its text part alone, as the run has trained it
            export.load_whole(whole, "auto").save_pretrained(trained)
            export.load_processor(whole).save_pretrained(trained)
            if (whole / record.FOLDER).exists():
                shutil.copytree(whole / record.FOLDER, trained / record.FOLDER)
            expected.copy(whole, trained)
            whole = trained
        part.mkdir()
        if (whole / record.FOLDER).is_dir():
            shutil.copytree(whole / record.FOLDER, part / record.FOLDER)
        say(f"writing {kind.title} with {kind.quantizer}")
        if kind.quantizer == "llama.cpp":
            file = _convert(whole, part, kind, place)
            ask = partial(_answer, file, kind=kind, place=place)
            found: measure.Comparison | None
            if held_out and held_out.metric == "loss":
                found = measure.losses(whole, held_out, say, lambda sequences: ask({"sequences": sequences}))
            else:
                found = measure.answers(whole, held_out, say, ask)
        else:
            _quantize(whole, part, kind, held_out, place)
            found = measure.tokens(whole, part, held_out, say)
        expected.copy(whole, part)
        before, after = (size(folder) for folder in (whole, part))
        if found and (reason := measure.lost(found, allowed)):
            others = f"{kind.wider}, and --allow-drop 5" if kind.wider else "--allow-drop 5"
            raise UserError(f"{kind.typed}: {reason} Nothing was written; {others} accepts five points.")
        results = {
            "kind": kind.name if kind.option == "--quantize" else f"gguf {kind.name}",
            "title": kind.title,
            "quantizer": kind.quantizer,
            "loads_in": kind.loads_in,
            "bytes_before": before,
            "bytes_after": after,
        }
        record.add(part, {record.QUANTIZATION: results | (found.recorded() if found else {})})
        complete.finish(part, output)
        export.move(part, output)
    why = f"llama.cpp has no {held_out.metric}" if held_out else "no held-out examples known"
    measured = found.lines() if found else [f"not measured: {why}"]
    return [f"{before / MIB:,.1f} -> {after / MIB:,.1f} MiB of weights; loads in {kind.loads_in}", *measured]


def size(folder: Path) -> int:
    """Return the size of a folder's weights, in bytes."""
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in folder.glob(pattern))


def _quantize(whole: Path, part: Path, kind: Kind, held_out: "HeldOut | None", place: Path) -> None:
    """Write the quantised weights and their config.json into `part`, with copies of all other files."""
    from ...training import export

    own = {file.name for pattern in WEIGHTS for file in whole.glob(pattern)}
    for file in export.model_files(whole)[0]:
        name = file.relative_to(whole)
        if str(name) not in own and name.parts[0] != record.FOLDER:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, part / name)
    from . import fp8_blocks

    written = place / "quantised"
    if kind.name == "fp8-block":
        fp8_blocks.write(whole, written)
    elif kind.quantizer == "bitsandbytes":
        import torch
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        from ...training import distributed
        from ...training.model import generate, load

        trusted = base_model.may_run_code(whole)
        options: Json = {"config": load.config_of(whole, trusted), "trust_remote_code": trusted}
        dtype = AutoModelForCausalLM.from_pretrained(whole, dtype="auto", device_map="meta", **options).dtype
        # bitsandbytes' 8-bit product accepts only 16-bit numbers.
        compute = torch.bfloat16 if dtype == torch.float32 else dtype
        if kind.scheme == "nf4":
            config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
        else:
            config = BitsAndBytesConfig(load_in_8bit=True)
        options |= {"quantization_config": config, "device_map": str(distributed.device())}
        model = AutoModelForCausalLM.from_pretrained(whole, dtype=compute, **options)
        generate.correct_settings(model, str(whole))
        model.save_pretrained(written)
    else:
        from . import measure

        calibration = []
        if kind.calibrated:
            calibration = [place / "calibration.json"]
            calibration[0].write_text(json.dumps(measure.calibration(held_out, whole)), encoding="utf-8")
        python = environment.require("llmcompressor", kind.typed)
        _run(kind, place, python, COMPRESS, whole, written, kind.scheme, *calibration)
    for pattern in WEIGHTS:
        for file in written.glob(pattern):
            shutil.move(file, part)


def _convert(whole: Path, part: Path, kind: Kind, place: Path) -> Path:
    """Write the model as GGUF with a Modelfile for Ollama into `part`, and return the GGUF file."""
    from ...training import export
    from ...training.model import generate
    from . import gguf

    python, converter = environment.require_llama_cpp(kind.typed)
    file = part / f"model-{kind.name}.gguf"
    known = gguf.pre_tokenizer(whole)
    _run(kind, place, python, CONVERT, converter, whole, file, kind.scheme, *([known] if known else []))
    text = gguf.modelfile(export.load_tokenizer(whole), file.name, generate.ends_in(whole))
    (part / "Modelfile").write_text(text, encoding="utf-8")
    return file


def log_probabilities(folder: Path, sequences: list[Json]) -> list[Json]:
    """Return llama.cpp's log-probabilities of tokens (`gguf_answer.py`), by a folder's GGUF file or its fp32 model."""
    with children.scratch("ds-recipes-gguf-") as place:
        file = next(folder.glob("*.gguf"), None) or _convert(folder, place, UNROUNDED, place)
        found: list[Json] = _answer(file, {"sequences": sequences}, UNROUNDED, place)
        return found


def _answer(file: Path, asked: Json, kind: Kind, place: Path) -> Any:
    """Return the tokens of the prompts and of llama.cpp's answers, or its log-probabilities (`gguf_answer.py`)."""
    questions, answers = place / "questions.json", place / "answers.json"
    questions.write_text(json.dumps(asked), encoding="utf-8")
    _run(kind, place, environment.require_llama_cpp(kind.typed)[0], ANSWER, file, questions, answers)
    return json.loads(answers.read_text(encoding="utf-8"))


def _run(kind: Kind, place: Path, *words: object) -> None:
    """Run a script in the serving environment."""
    done = children.run(
        list(map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=place,  # llm-compressor leaves a log folder in its working directory
        env=environment.variables() | {"GGML_NO_BACKTRACE": "1"},  # llama.cpp would start a debugger
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if re.search("Error|ERROR|GGML_ASSERT", line)] or lines
        why = next((line for line in lines if "error loading model" in line), errors[-1]).replace(f"{place}/", "")
        raise UserError(f"{kind.typed}: {kind.quantizer} cannot convert this model: {why[:300]}")
