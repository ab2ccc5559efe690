"""The certificate: whether the model in a folder, or on a server, is the one that was trained.

`expected.json` in the export has the trained model's log-probabilities of fixed answers. They are computed again, by
transformers or by a server, and compared; where they differ, the folder is searched for the cause.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..recipe.errors import UserError
from ..recipe.files import Json, JsonView, text_of
from ..recipe.run_folder import read_json
from ..training import server as servers
from ..training.model_folder import base_model, card, expected, record, weights
from ..training.model_folder.expected import BOUNDS
from ..training.server import Server
from .serve import engines, environment, served

QUANTIZED = 0.5
"""The bound for a quantised copy, whose weights differ by intention."""


@dataclass(frozen=True)
class Result:
    """One text's comparison."""

    text: str
    difference: float
    """Mean absolute difference of the log-probabilities of its answer's tokens, in nats."""
    likeliest: int
    """Number of places at which the likeliest token differs."""
    places: int


@dataclass(frozen=True)
class Certificate:
    """The comparison of a model with what was trained."""

    results: tuple[Result, ...]
    bound: float
    causes: tuple[str, ...] = ()
    like_base: bool = False
    """The answers are nearer to the base model's than to the trained model's: the adapter is missing."""
    routed: bool = False
    """An MoE model in 16 bits, where rounding alone can send a token to another expert (`BOUNDS`)."""

    @property
    def difference(self) -> float:
        """The largest difference of a text or, if `routed`, the mean over the tokens of all texts."""
        if self.routed:
            return sum(result.difference * result.places for result in self.results) / self.places
        return max(result.difference for result in self.results)

    @property
    def agrees(self) -> bool:
        """True if the model is the one that was trained."""
        return not self.difference > self.bound and not self.like_base and not self.causes

    @property
    def places(self) -> int:
        """The number of tokens that were compared."""
        return sum(result.places for result in self.results)

    @property
    def same(self) -> int:
        """The number of places at which the likeliest token is the trained model's."""
        return self.places - sum(result.likeliest for result in self.results)

    def __str__(self) -> str:
        verdict = "agrees with" if self.agrees else "DIFFERS from"
        return (
            f"{verdict} the trained model: log-probabilities within {self.difference:.2g} nats"
            f"{' on average' * self.routed} (bound {self.bound:g}), "
            f"{self.same} of {self.places} likeliest tokens the same"
        )

    def record(self, folder: Path, server: str) -> bool:
        """Write that the model agrees into its folder's results and model card, or return False if it has none.

        `server` computed the answers: `transformers`, `vllm` or `llama.cpp`.
        """
        if (held := record.read(folder)) is None:
            return False
        verdict = {"difference": self.difference, "bound": self.bound, "same": self.same, "places": self.places}
        verdicts = {**held.results.get(record.CERTIFICATES, {}), environment.titled(server): verdict}
        record.add(folder, {record.CERTIFICATES: verdicts})
        return card.write(folder)


def read(folder: Path) -> Json:
    """Return a folder's `expected.json`."""
    if not (folder / base_model.EXPECTED).exists():
        raise UserError(
            f"{folder}: has no {base_model.EXPECTED}: an older version exported it, it scores instead of writing, or "
            "is not an export; ds-recipes launch RECIPE VARIANT --resume --output-dir RUN writes a run's export again."
        )
    found: Json = read_json(folder / base_model.EXPECTED)
    if found.get("version") != expected.VERSION or not found.get("texts"):
        raise UserError(f"{folder / base_model.EXPECTED}: of another version, or damaged; export the run again.")
    return found


def of_folder(folder: Path) -> Certificate:
    """Return the certificate of a folder, loaded with transformers in this process."""
    import torch
    from transformers import utils

    from ..training import distributed, export
    from ..training.model import heads

    wanted = read(folder)
    utils.logging.disable_progress_bar()
    model = export.load(folder, placed=True)
    with torch.no_grad():
        found = expected.measured(
            lambda tokens: heads.outputs(model(input_ids=tokens)), wanted["texts"], distributed.device()
        )
    return compare(wanted, found, folder)


ROUNDED = "llama.cpp rounds the range of YaRN's frequencies, and config.json has rope_parameters.truncate=false"


def of_llama_cpp(folder: Path) -> Certificate:
    """Return the certificate of a folder's GGUF file, or of its whole model in fp32, as llama.cpp computes it."""
    from .quantize import write

    wanted = read(folder)
    found = compare(wanted, write.log_probabilities(folder, wanted["texts"]), folder)
    rope = text_of(base_model.config_of(folder)).get("rope_parameters") or {}
    return found if found.agrees or rope.get("truncate", True) else replace(found, causes=(*found.causes, ROUNDED))


def of_server(server: Server, folder: Path, read_tensors: bool = True) -> Certificate:
    """Return the certificate of a model on a server, against the `expected.json` of a folder on this machine.

    With `read_tensors` the folder's tensors, all of its weights, are compared even if the answers agree.
    """
    wanted = read(folder)
    found = expected.served(server, wanted["texts"])
    certificate = compare(wanted, found, folder, read_tensors)
    for text in wanted["texts"]:
        if "messages" not in text:
            break
        counted = servers.prompt_tokens(server, text["messages"])
        if counted is not None and counted != text["start"]:
            cause = (
                f"the server's chat template makes {counted} tokens of {text['messages'][-1]['content']!r}, and the "
                f"training's {text['start']}"
            )
            return replace(certificate, causes=(*certificate.causes, cause))
    return certificate


def compare(wanted: JsonView, found: list[Json], folder: Path, read_tensors: bool = True) -> Certificate:
    """Return the certificate of answers, with the causes that the folder shows; `read_tensors` as for `of_server`."""
    results, base = [], []
    for text, one in zip(wanted["texts"], found, strict=True):
        off = expected.apart(text["logprobs"], one["logprobs"])
        if "base_logprobs" in text:
            base.append((off, expected.apart(text["base_logprobs"], one["logprobs"])))
        named = text["messages"][-1]["content"] if "messages" in text else text["text"]
        others = sum(mine != theirs for mine, theirs in zip(text["likeliest"], one["likeliest"], strict=True))
        results.append(Result(str(named).strip(), off, others, len(one["logprobs"])))
    bound = BOUNDS.get(wanted["dtype"], BOUNDS["bfloat16"])
    routed = False
    with contextlib.suppress(UserError):  # a server's adapter, whose base model need not be on this machine
        routed = wanted["dtype"] != "float32" and engines.has_experts(served.whole(folder))
    if file := next(folder.glob("*.gguf"), None):
        bound = max(bound, BOUNDS["float16"]) if file.stem.endswith("-f16") else QUANTIZED
    elif (folder / "config.json").exists() and base_model.config_of(folder).get("quantization_config"):
        bound = QUANTIZED
    like_base = sum(from_trained for from_trained, _ in base) > sum(from_base for _, from_base in base)
    alone = Certificate(tuple(results), bound, like_base=like_base, routed=routed)
    return replace(alone, causes=tuple(causes(wanted, folder, read_tensors or not alone.agrees)))


def causes(wanted: JsonView, folder: Path, read_tensors: bool = True) -> Iterator[str]:
    """Yield what is in a folder otherwise than it was written: tensors, settings, end tokens, template, tokenizer."""
    now = expected.described(folder, read_tensors)
    before, after = (wanted["tensors"], now["tensors"]) if read_tensors else ({}, {})
    for title, names in (
        ("lacks", sorted(set(before) - set(after))),
        ("has, and was not trained with", sorted(set(after) - set(before))),
        ("has other values of", sorted(name for name in set(before) & set(after) if before[name] != after[name])),
    ):
        if names:
            yield f"the folder {title} {names[0]}{weights.more(names)}"
    for title, key in (
        ("config.json", "config"),
        ("adapter_config.json", "adapter"),
        ("generation_config.json", "generation"),
    ):
        old, new = wanted.get(key, now[key]) or {}, now[key] or {}  # earlier versions did not write `generation`
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name) and (name in old or name not in expected.ADDED):
                yield f"{title}: {name} is {new.get(name)}, and was {old.get(name)}"
    if len(wanted["base"] or "") == len(now["base"] or "") and wanted["base"] != now["base"]:  # see export.load_base
        yield "the adapter's base model differs"
    ends = [one if isinstance(one, list) else [one] for one in (wanted["end_tokens"], now["end_tokens"])]
    if set(ends[0]) != set(ends[1]):
        yield f"generation_config.json: eos_token_id is {now['end_tokens']}, and was {wanted['end_tokens']}"
    if other := wanted["chat_template"] != now["chat_template"]:
        yield "chat_template.jinja differs"
    if not any(folder.glob("tokenizer*")):  # GGUF files have their own
        return
    from ..training import export

    tokenizer = export.load_tokenizer(folder)
    # The prompts differ with the template, and where it writes today's date.
    answers_only = other or "strftime_now" in (tokenizer.chat_template or "")
    for text, sequence in zip(wanted["texts"], expected.sequences(tokenizer), strict=True):
        old, new = (one["tokens"][one["start"] * answers_only :] for one in (text, sequence))
        if old != new:
            yield f"the tokenizer makes other tokens of {sequence['answer']!r}"
            return
    if wanted.get("tokenizer", now["tokenizer"]) != now["tokenizer"]:  # earlier versions did not write it
        yield "tokenizer.json differs"
