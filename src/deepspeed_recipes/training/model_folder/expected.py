"""Writes `expected.json`: what the trained model answers, so that every later copy of it can be held to that.

The certificate (`export/certificate.py`, `ds-recipes certify`) compares a folder or a server with it. The texts are
this module's own, so that a published folder holds none of the training data. They are continued by fixed answers, of
which the file has the log-probability of each token and the likeliest token at its place: a forward pass for every
eight texts, no sampling, and nothing that rounding could turn into another answer.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase, Trainer

from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView, text_of
from ...recipe.run_folder import read_json, write_json
from .. import distributed
from .. import server as servers
from . import base_model, weights

VERSION = 1
BOUNDS = {"float32": 0.002, "float16": 0.03, "bfloat16": 0.06}
"""Mean difference of a token's log-probability, in nats, that rounding explains, by the dtype of the training.

Seen with the tiny model on two CPU ranks (2026-11-26), 24 steps, the largest of the sixteen texts: fp32 with an adapter
0, merged 6e-6; bf16 with all weights 3e-6, with an adapter 0.029; that adapter left out: 1.9 to 4.9; merged and in nf4:
0.43.

In 16 bits, rounding sends some tokens of an MoE model to other experts, and such a token changes by up to 3 nats. Its
shortest texts have five tokens, too few for that, so the mean over the 500 tokens of all texts has to be within the
bound. Seen with the drafts of all nine families with experts (2026-11-28; five random adapters each, which change the
base's answers by 0.1 to 0.8), merged in bf16: 0.008 to 0.047, with single texts at up to 0.19, also if the merged
weights compute in fp32. Scaled by the rank: 0.9 to 1.4; transposed, left out or merged twice: as far as the base."""
SAMPLED = 256
"""Number of a model's tensors of which a part is in its digest."""
LONGEST = 64
"""Maximum number of tokens of an answer that are compared."""
DIGITS = 5
TOGETHER = 8
"""Texts in a forward pass: below ZeRO-3 each pass gathers the whole model, and more logits would be gigabytes."""
TEXTS: list[tuple[str, str]] = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
"""Sixteen questions, each with an answer to compare; whether a model would answer so does not matter."""
CONFIGURED = (
    *("architectures", "model_type", "vocab_size", "tie_word_embeddings", "rope_parameters", "rope_theta"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "rms_norm_eps"),
    *("rope_scaling", "quantization_config"),
)
"""Keys of config.json that change what a model computes, and that servers read."""
ADDED = ("dtype", "max_position_embeddings")
"""More of them, which earlier versions did not write."""
ADAPTED = (
    *("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "target_parameters", "modules_to_save"),
    "trainable_token_indices",
)
"""Keys of adapter_config.json that change what an adapter adds."""
UNUSED = ("transformers_version", "_from_model_config", "use_cache", "output_attentions", "output_hidden_states")
"""Keys of generation_config.json that change no answer."""


def sequences(tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """Return the texts as the model reads them: `messages` or `text`, `tokens`, and `start`, where the answer begins.

    A tokenizer without a chat template gets question and answer as one text.
    """
    found = []
    for question, answer in TEXTS:
        if tokenizer.chat_template:
            asked = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            example: Json = {"messages": asked}
        else:
            prompt = f"{question}\n"
            example = {"text": prompt}
        ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        answered = tokenizer(answer, add_special_tokens=False)["input_ids"][:LONGEST]
        found.append({**example, "answer": answer, "tokens": [*ids, *answered], "start": len(ids)})
    return found


@torch.no_grad()
def measured(
    forward: Callable[[torch.Tensor], torch.Tensor], examples: Sequence[JsonView], device: object = "cpu"
) -> list[Json]:
    """Return for each example the log-probability of each answer's token and the likeliest token at its place.

    `forward` maps token ids, [texts, length], to logits, [texts, length, vocabulary], each from the tokens up to it
    alone, as shorter texts are padded at their end; a collective if ranks share a model. `examples` are `sequences`'.
    """
    found = []
    for first in range(0, len(examples), TOGETHER):
        together = examples[first : first + TOGETHER]
        rows = [torch.tensor(example["tokens"]) for example in together]
        batch = forward(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device))
        for example, tokens, logits in zip(together, rows, batch, strict=True):
            answer = slice(example["start"], len(tokens))
            places = logits[answer.start - 1 : answer.stop - 1].float().cpu().log_softmax(-1)
            wanted = places.gather(-1, tokens[answer, None])[:, 0]
            logprobs = [round(value, DIGITS) for value in wanted.tolist()]
            found.append({"logprobs": logprobs, "likeliest": places.argmax(-1).tolist()})
    return found


def served(server: servers.Server, examples: Sequence[JsonView]) -> list[Json]:
    """Return the answers of a server, in the form of `measured`."""
    return [servers.log_probabilities(server, one["tokens"], one["start"]) for one in examples]


def apart(wanted: Sequence[float], found: Sequence[float]) -> float:
    """Return the mean absolute difference of two lists of log-probabilities; infinity if they cannot be compared."""
    if len(wanted) != len(found):
        return float("inf")
    pairs = [abs(one - other) for one, other in zip(wanted, found, strict=True)]
    mean = sum(pairs) / max(len(pairs), 1)
    return mean if mean == mean else float("inf")  # a NaN means that they disagree


def write_of(
    trainer: Trainer, forward: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, folder: Path
) -> None:
    """Write the file of a run, of a model that writes text, into its export; a collective.

    `forward` is as for `measured`; every rank calls it. `dtype` is that in which the model computes.
    """
    examples = sequences(trainer.processing_class)
    model = trainer.model
    trained, base = measured(forward, examples, distributed.device()), None
    if isinstance(model, PeftModel):  # a pipeline's stages are none
        with model.disable_adapter():
            base = measured(forward, examples, distributed.device())
    if distributed.is_first():
        write(folder, examples, dtype, trained, base)


def write(
    folder: Path,
    examples: Sequence[JsonView],
    dtype: torch.dtype,
    trained: Sequence[JsonView],
    base: Sequence[JsonView] | None = None,
) -> None:
    """Write the file into an export.

    `trained` are the trained model's answers as `measured` returns them, computed in `dtype`. For an adapter, `base`
    are the base model's: what a server gives that leaves the adapter out.
    """
    both = zip(examples, trained, base or [{}] * len(trained), strict=True)
    content = {
        "version": VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "texts": [
            {**example, **answers, **({"base_logprobs": without["logprobs"]} if without else {})}
            for example, answers, without in both
        ],
    }
    write_json(folder / base_model.EXPECTED, content | described(folder))


def copy(source: Path, folder: Path) -> None:
    """Write the file of `source` into a copy of its model, merged, quantised or not, with the copy's own tensors."""
    if (source / base_model.EXPECTED).exists():
        write_json(folder / base_model.EXPECTED, read_json(source / base_model.EXPECTED) | described(folder))


def described(folder: Path, tensors: bool = True) -> Json:
    """Return values that explain a copy's difference: settings, end tokens, digests of the template and the tensors."""
    import xxhash

    adapter = folder / base_model.ADAPTER
    adapted = base = None
    if adapter.exists():
        adapted = {key: value for key, value in read_json(adapter).items() if key in ADAPTED}
        with contextlib.suppress(UserError):  # the base model is not on this machine
            base = of_weights([base_model.find(folder)])
    config = base_model.config_of(folder)
    generation = read_json(folder / "generation_config.json", {})
    template, text = folder / "chat_template.jinja", text_of(config)
    tokenizer = {**read_json(folder / "tokenizer.json", {}), "padding": None, "truncation": None}  # as last used
    return {
        "config": {
            key: text.get(key, config.get(key)) for key in (*CONFIGURED, *ADDED) if key in text or key in config
        },
        "adapter": adapted,
        "base": base,
        "end_tokens": generation.pop("eos_token_id", None),
        "generation": {key: value for key, value in generation.items() if key not in UNUSED},
        "chat_template": xxhash.xxh3_64(template.read_bytes()).hexdigest() if template.exists() else None,
        "tokenizer": xxhash.xxh3_64(json.dumps(tokenizer, sort_keys=True).encode()).hexdigest(),
        **({"tensors": digests(folder)} if tensors else {}),
    }


def of_weights(folders: Iterable[Path]) -> str:
    """Return a digest of models' weights, of the first row of `SAMPLED` tensors each: training changes all of them.

    Whichever files hold the weights, the digest is the same.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    for folder in folders:
        held = {name: file for file in weights.files(folder) for name in weights.header(file)}
        for name in sorted(held)[:: -(-len(held) // SAMPLED)]:
            with safe_open(held[name], "pt") as opened:
                part = opened.get_slice(name)
                shape = part.get_shape()
                row = part[tuple(slice(0, 1) for _ in shape[:-1])] if shape[1:] else opened.get_tensor(name)
            digest.update(f"{name} {part.get_dtype()} {shape}".encode())
            digest.update(row.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def altered(folder: Path) -> str | None:
    """Return which tensors are others than those recorded when the folder was written, or None; reads all of them."""
    held = read_json(folder / base_model.EXPECTED, {}).get("tensors")
    if not held:
        return None
    weights.check_intact(folder)
    now = digests(folder)
    if names := sorted(name for name in {*held, *now} if held.get(name) != now.get(name)):
        return f"{folder}: {names[0]}{weights.more(names)} is not as it was written: the file is damaged or was changed"
    return None


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every tensor in a folder's weight files: of its dtype, its shape and its bytes.

    A GGUF file, which llama.cpp writes and reads, counts as one tensor.
    """
    import xxhash

    if gguf := list(folder.glob("*.gguf")):
        found = {}
        for file in gguf:
            with file.open("rb", buffering=0) as opened:  # read in blocks: it may be larger than the memory
                found[file.name] = hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()
        return found
    adapter, further = folder / "adapter_model.safetensors", folder / base_model.FURTHER_TOKEN
    found = {}
    for file in [adapter, *[further] * further.exists()] if adapter.exists() else weights.files(folder):
        with safe_open(file, "pt") as opened:
            names: list[str] = list(opened.keys())
            for name in names:
                tensor = opened.get_tensor(name).contiguous()
                digest = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(tensor.view(-1).view(torch.uint8).numpy())
                found[name] = digest.hexdigest()
    return found
