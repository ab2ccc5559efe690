"""Writes a trained model as one GGUF file, compares its answers with the original's, and refuses too large a loss."""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...machine import children
from ...recipe.errors import UserError
from ...recipe.run_folder import read_json
from ...training import export
from ...training.model_folder import base_model, complete, record
from ...training.parallel import scores
from ..evaluate import score
from ..evaluate.held_out import HeldOut
from ..serve import environment
from . import modelfile, pre_tokenizer

KINDS = {"f16": "16-bit weights", "q8_0": "8-bit weights", "q4_k_m": "4-bit weights, and 6 bits where they count most"}
CONVERT, ANSWER = (Path(__file__).with_name(name) for name in ("convert.py", "answer.py"))
MODELFILE = "Modelfile"
LOADS_IN = "llama.cpp, and Ollama (ollama create NAME -f Modelfile)"


@dataclass(frozen=True)
class Written:
    """The result of `write`."""

    kind: str
    before: int
    """Size of the original's weights, in bytes."""
    after: int
    scores: tuple[float, float] | None
    """Exact match before and after, or None if no held-out conversations are known."""
    examples: int
    same: float
    """Share of the examples to which both models give the same answer."""

    def recorded(self) -> dict[str, Any]:
        """Return the result for `training/results.json`."""
        found: dict[str, Any] = {"kind": f"gguf {self.kind}", "title": KINDS[self.kind], "quantizer": "llama.cpp"}
        found |= {"loads_in": LOADS_IN, "bytes_before": self.before, "bytes_after": self.after}
        if self.scores is None:
            return found
        measured = {"metric": "exact_match", "before": self.scores[0], "after": self.scores[1]}
        return found | measured | {"examples": self.examples, "same_answer": self.same}

    def lines(self) -> list[str]:
        """Return the result as lines to print."""
        mib = 2**20
        lines = [f"{self.before / mib:,.1f} -> {self.after / mib:,.1f} MiB; loads in {LOADS_IN}"]
        if self.scores is None:
            return [*lines, "not measured: no held-out conversations known"]
        before, after = self.scores
        lines.append(f"exact match on {self.examples} held-out examples: {before:.1%} -> {after:.1%}")
        return [*lines, f"the same answer to {self.same:.1%} of them"]


def check(source: Path, output: Path, kind: str) -> None:
    """Refuse a conversion that cannot succeed, before anything is loaded.

    Raises:
        UserError: an unknown kind, no model that writes text, an output in use, or llama.cpp is not installed.
    """
    if kind not in KINDS:
        raise UserError(f"--gguf {kind}: choose {', '.join(KINDS)}.")
    complete.check_smaller(source, output, "--gguf")
    environment.require_llama_cpp(f"--gguf {kind}")


def write(
    source: Path, output: Path, kind: str, held_out: HeldOut | None, allowed: float, say: Callable[[str], None]
) -> Written:
    """Write a model as GGUF, completely or not at all.

    Args:
        source: a whole model, or an adapter, which is merged first.
        output: a new or empty folder for the file, a Modelfile, the card and the record.
        kind: one of `KINDS`.
        held_out: the held-out questions for both models, or None.
        allowed: percentage points of exact match that the GGUF file may lose.
        say: prints progress.

    Raises:
        UserError: llama.cpp cannot convert this model, or the GGUF file lost more than is allowed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with children.scratch(output.name + ".", inside=output.parent) as place:
        whole, part = source, place / "part"
        if (source / base_model.ADAPTER).exists():
            whole = place / "merged"
            export.write(source, whole, merge=True)
        part.mkdir()
        file = part / f"model-{kind}.gguf"
        say(f"writing {KINDS[kind]} with llama.cpp's converter")
        _, converter = environment.require_llama_cpp(f"--gguf {kind}")
        _run(kind, CONVERT, converter, whole, file, kind, *_substitute(whole), place=place)
        tokenizer = export.load_tokenizer(whole)
        (part / MODELFILE).write_text(modelfile.write(tokenizer, file.name), encoding="utf-8")
        written = _measured(whole, file, kind, held_out, place, say)
        if (whole / record.FOLDER).is_dir():
            shutil.copytree(whole / record.FOLDER, part / record.FOLDER)
        if written.scores and 100 * (written.scores[0] - written.scores[1]) > allowed:
            before, after = written.scores
            raise UserError(
                f"--gguf {kind}: exact match falls from {before:.1%} to {after:.1%} on {written.examples} held-out "
                f"examples ({allowed:g} points allowed). Nothing was written; q8_0 and f16 lose less."
            )
        complete.of_quantized(part, output, written.recorded())
        export.move(part, output)
    return written


def _substitute(whole: Path) -> Sequence[str]:
    found = pre_tokenizer.substitute(whole)
    return [found] if found else []


def _measured(
    whole: Path, file: Path, kind: str, held_out: HeldOut | None, place: Path, say: Callable[[str], None]
) -> Written:
    before = sum(weights.stat().st_size for weights in whole.glob("*.safetensors"))
    if held_out is None or held_out.metric != "exact_match":
        return Written(kind, before, file.stat().st_size, None, 0, 0.0)
    examples = len(held_out.examples)
    say(f"comparing both models' answers to {examples} held-out questions")
    original = score.of(whole, held_out)
    answers = _answers(whole, file, held_out, place, kind)
    right = [answer.right for answer in answers]
    same = [answer.text == theirs for answer, theirs in zip(answers, original.answers, strict=True)]
    both = (original.value, sum(right) / examples)
    return Written(kind, before, file.stat().st_size, both, examples, sum(same) / examples)


def _answers(whole: Path, file: Path, held_out: HeldOut, place: Path, kind: str) -> list[scores.Answer]:
    """Return llama.cpp's answers to the held-out questions.

    Raises:
        UserError: llama.cpp's tokens differ from those on which the model was trained.
    """
    tokenizer = export.load_tokenizer(whole)
    asked_of = score.questions(tokenizer, held_out)
    ends = read_json(whole / "generation_config.json").get("eos_token_id", tokenizer.eos_token_id)
    stop = {*(ends if isinstance(ends, list) else [ends]), *scores.closing(asked_of, tokenizer)}
    asked = {
        "texts": [tokenizer.decode(one.prompt, clean_up_tokenization_spaces=False) for one in asked_of],
        "ends": sorted(stop),
        "max_new_tokens": held_out.recipe.data.max_new_tokens,
    }
    (place / "questions.json").write_text(json.dumps(asked))
    _run(kind, ANSWER, file, place / "questions.json", place / "answers.json", place=place)
    found = read_json(place / "answers.json")
    if found["prompts"] != [one.prompt for one in asked_of]:
        raise UserError(f"--gguf {kind}: llama.cpp tokenizes differently from the model's tokenizer; use vLLM.")
    pairs = zip(asked_of, found["answers"], strict=True)
    return [scores.compared(one, answer, stop, tokenizer) for one, answer in pairs]


def _run(kind: str, script: Path, *words: object, place: Path) -> None:
    """Run a script in the serving environment.

    Raises:
        UserError: the script failed; quotes its error.
    """
    python, _ = environment.require_llama_cpp(f"--gguf {kind}")
    done = children.run(
        [str(python), str(script), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
        env=environment.variables(),
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if "Error" in line or "ERROR" in line] or lines
        raise UserError(f"--gguf {kind}: llama.cpp cannot convert this model: {errors[-1][:300]}")
