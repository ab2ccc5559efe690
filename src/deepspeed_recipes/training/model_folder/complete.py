"""Adds to exported weights the files that make the folder usable on any machine.

`response_template` in the tokenizer's files extracts an answer from the text that a model has written: without it, for
most chat templates, `transformers serve` returns the whole conversation. sentence-transformers loads an embedding
model, including its pooling, by files in the form of its versions 2 to 5, which later versions also read.
"""

import os
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

from ...recipe import files
from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView
from ...recipe.methods import Embed
from ...recipe.run_folder import (
    CHECK_FAILED,
    RunFolder,
    comparable,
    read_json,
    read_jsonl,
    read_recipe,
    step_of,
    write_json,
)
from . import base_model, card, record


def check(source: Path, output: Path) -> None:
    """Refuse to overwrite files, and to copy a model that failed its check, or that is not as it was written."""
    files.check_writable("--output", output, folder=True)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output}: exists and is not empty; choose a new folder.")
    if (source / CHECK_FAILED).exists():
        raise UserError(f"{source}: this export failed its check: it computes other logits than the trained model.")
    check_unaltered(source)


def check_unaltered(source: Path) -> None:
    """Refuse a model with other tensors than were written; reads all of them."""
    from . import expected  # imports torch, without which `publish` reads a folder

    if wrong := expected.altered(source):
        raise UserError(
            f"{wrong}; export a checkpoint of the run, or, if you changed it, remove {source / base_model.EXPECTED}."
        )


def of_run(folder: Path, run: RunFolder, place: Path, results: JsonView, step: int | None = None) -> None:
    """Add the card, `training/` and the response template to weights of a run, and remove absolute paths.

    `folder`, which will be renamed to `place`, holds the weights. `results` is the content of the run's summary.json,
    now or later; `step` is the checkpoint's with these weights, or None for the run's result.
    """
    record.write(folder, record.of_run(run, results, step), run.deepspeed)
    finish(folder, place)


def of_copy(folder: Path, source: Path, place: Path) -> None:
    """Do the same for weights that are copied from a run's export, one of its checkpoints, or any model folder.

    An embedding model keeps the files of its pooling. A folder of another origin keeps its own card.
    """
    from . import expected  # imports torch, without which `publish` reads a folder

    expected.copy(source, folder)
    for name in FILES:
        if (source / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy2(source / name, folder / name)
    if (source / record.FOLDER / record.RECIPE).exists():
        shutil.copytree(source / record.FOLDER, folder / record.FOLDER)
    elif (run := RunFolder(source.parent)).recipe.exists():
        return of_run(folder, run, place, read_json(run.summary, {}))
    elif (run := RunFolder(source.parents[1])).recipe.exists() and source.name.startswith("checkpoint-"):
        step, metric = step_of(source), read_recipe(run).metric
        rows = comparable([row for row in read_jsonl(run.evaluations) if row["step"] <= step])
        measured = {row["step"]: row.get(metric) for row in rows}  # as far as it was then
        results = {"metric": metric, "before": measured.get(0), "after": measured.get(step)}
        return of_run(folder, run, place, results, step)
    elif (source / card.FILE).exists():
        shutil.copy2(source / card.FILE, folder)
    finish(folder, place)


def finish(folder: Path, place: Path) -> None:
    """Add the card and the response template to weights with `training/`, and remove paths and certificates.

    An adapter's base model that is the project's keeps its place in the checkout, one in Hugging Face's cache gets its
    Hub id, and any other is named relative to `place` (`../draft_model`): both can be moved together.
    """
    record.add(folder, {record.CERTIFICATES: None})
    adapter = read_json(folder / base_model.ADAPTER, {})
    base = str(adapter.get(base_model.KEY) or "")
    if PurePath(base).is_absolute():
        moved = record.portable_path(base)
        if moved == PurePath(base).name:  # neither the project's nor the Hub's
            moved = os.path.relpath(base, place.resolve())
        write_json(folder / base_model.ADAPTER, adapter | {base_model.KEY: moved})
    file = folder / CONFIG
    if file.exists():
        from transformers import AutoTokenizer

        values = {key: value for key, value in read_json(file).items() if key not in HERE_ONLY}
        if values.get(KEY) is None:
            try:
                found = of_tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
            except (OSError, ValueError):  # a tokenizer with its own code, which is not run for this
                found = None
            values |= {KEY: found} if found else {}
        write_json(file, values)
    card.write(folder)


POOLING, NORMALIZE = "1_Pooling/config.json", "2_Normalize/config.json"
FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", POOLING, NORMALIZE)
MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
"""The stages of an embedding, and the folder of each stage's settings."""


def write_pooling(folder: Path, settings: Embed, hidden_size: int, longest: int) -> None:
    """Write the files next to the weights of an embedding model or its adapter; it cuts texts at `longest` tokens."""
    contents: Json = {
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (kind, path) in enumerate(MODULES)
        ],
        "sentence_bert_config.json": {"max_seq_length": longest, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {},
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        POOLING: {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": settings.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_weightedmean_tokens": False,
            "pooling_mode_lasttoken": settings.pooling == "last",
            "include_prompt": True,
        },
        NORMALIZE: {},
    }
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, contents[name])


CONFIG = "tokenizer_config.json"
KEY = "response_template"
HERE_ONLY = ("is_local", "local_files_only")
"""Keys in the tokenizer's configuration that transformers writes about how it was loaded on this machine."""
_ASKED = {"role": "user", "content": "Where is it?"}
_SAID, _THOUGHT = "Over there.", "Let me see."
_CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}
_REASONING = {"open": "<think>", "close": "</think>", "content": "text"}
_JSON_CALLS = {
    # Otherwise the white space before a call would be an empty answer that replaces the previous one.
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_TAGGED_CALLS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_CALLED = {"content": _SAID, "tool_calls": [_CALL]}
_FIELDS: tuple[tuple[str, Json, Json], ...] = (
    ("reasoning_content", _REASONING, {"content": _SAID, "reasoning_content": _THOUGHT}),
    ("tool_calls", _JSON_CALLS, _CALLED),
    ("tool_calls", _TAGGED_CALLS, _CALLED),
)
"""Fields in addition to the answer, in the forms of Qwen's and Hermes' templates, and a message with them."""


def of_tokenizer(tokenizer: Any) -> Json | None:
    """Return the response template derived from a tokenizer's chat template, or None if none can be derived.

    The answer starts after the generation prompt, and ends with the text that the template writes after an answer.
    Reasoning and tool calls become separate fields if a rendered answer that has them is parsed back into them.
    """
    try:
        opened = _rendered(tokenizer, [_ASKED], add_generation_prompt=True)
        asked = _rendered(tokenizer, [_ASKED])
        answer = _rendered(tokenizer, [_ASKED, {"role": "assistant", "content": _SAID}]).rpartition(_SAID)[2]
    except Exception:  # a template may refuse a conversation with any error
        return None
    stop = str(tokenizer.eos_token or "")
    if not opened.startswith(asked):
        asked = asked.removesuffix(stop)  # some templates end every conversation with it
    start = opened.removeprefix(asked).partition("<think>")[0]
    close = answer.strip().removesuffix(stop).strip() or stop
    if not start.strip() or not close:
        return None
    content = {"close": close, "content": "text"}
    if stop not in ("", close):
        # Otherwise white space between the two would be an empty answer that replaces the previous one.
        content = {"close_pattern": rf"\s*(?:{re.escape(close)}|{re.escape(stop)})", "content": "text"}
    spec: Json = {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": {"content": content}}
    for name, field, message in _FIELDS:
        wider = spec | {"fields": {name: field, **spec["fields"]}}
        if name not in spec["fields"] and _parses(tokenizer, wider, message):
            spec = wider
    return spec if _parses(tokenizer, spec, {"content": _SAID}) else None


def _parses(tokenizer: Any, spec: Json, message: Json) -> bool:
    """Return whether an answer, as the chat template writes it, is parsed back into the same message."""
    tools = {"tools": [_TOOL]} if "tool_calls" in message else {}
    anchor = spec["start_anchor"]
    try:
        before = _rendered(tokenizer, [_ASKED], add_generation_prompt=True, **tools)
        whole = _rendered(tokenizer, [_ASKED, {"role": "assistant", **message}], **tools)
        written = whole.rpartition(anchor)[2].rstrip()  # a model stops at the token that ends its turn
        parsed = tokenizer.parse_response(written, spec, prefix=before.rpartition(anchor)[0] + anchor)
    except Exception:  # raised by the template or the parser
        return False
    parsed = {key: value.strip() if isinstance(value, str) else value for key, value in parsed.items()}
    return parsed == {"role": "assistant", **message}


def _rendered(tokenizer: Any, turns: list[Json], **options: object) -> str:
    return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
