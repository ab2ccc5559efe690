"""Answer or score with a GGUF file; runs in the serving environment, so it imports nothing of the project.

    python gguf_answer.py MODEL.gguf QUESTIONS.json ANSWERS.json

QUESTIONS has `texts` (whole prompts), `ends` (tokens that end an answer) and `max_new_tokens`. ANSWERS receives the
tokens of each prompt in `prompts`, and the tokens of each answer, including its end token, in `answers`.

With `sequences` instead, each with `tokens` and `start`, ANSWERS is a list: `logprobs` of the tokens from `start`, and
the `likeliest` token at each of these places.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy
from llama_cpp import Llama


def main(model: str, questions: str, answers: str) -> None:
    """Answer every question, or score every sequence."""
    asked = json.loads(Path(questions).read_text())
    if "sequences" in asked:
        Path(answers).write_text(json.dumps(scored(model, asked["sequences"])))
        return
    llama = Llama(model, n_ctx=0, verbose=True)  # 0: the model's own context
    found: dict[str, list[list[int]]] = {"prompts": [], "answers": []}
    for text in asked["texts"]:
        prompt = llama.tokenize(text.encode(), add_bos=False, special=True)
        answer: list[int] = []
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            answer.append(token)
            if token in asked["ends"] or len(answer) == asked["max_new_tokens"]:
                break
        found["prompts"].append(prompt)
        found["answers"].append(answer)
    Path(answers).write_text(json.dumps(found))


def scored(model: str, sequences: list[dict]) -> list[dict]:
    """Return the log-probabilities of each sequence's tokens from its start; the key/value cache is not rounded."""
    whole = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    length = max(len(one["tokens"]) for one in sequences)
    llama = Llama(model, n_ctx=length, n_batch=length, logits_all=True, verbose=True, **whole)
    found = []
    for one in sequences:
        tokens, start = one["tokens"], one["start"]
        llama.reset()
        llama.eval(tokens)
        logits = llama.scores[start - 1 : len(tokens) - 1].astype(numpy.float64)
        places = logits - logits.max(-1, keepdims=True)
        places -= numpy.log(numpy.exp(places).sum(-1, keepdims=True))
        own = places[numpy.arange(len(places)), tokens[start:]]
        found.append({"logprobs": own.tolist(), "likeliest": places.argmax(-1).tolist()})
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
