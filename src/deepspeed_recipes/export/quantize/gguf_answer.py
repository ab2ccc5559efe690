"""Answer greedily with a GGUF file; runs in the serving environment, so it imports nothing of the project.

    python gguf_answer.py MODEL.gguf QUESTIONS.json ANSWERS.json

QUESTIONS has `texts` (whole prompts), `ends` (tokens that end an answer) and `max_new_tokens`. ANSWERS receives the
tokens of each prompt in `prompts`, and the tokens of each answer, including its end token, in `answers`.
"""

import json
import sys
from pathlib import Path

from llama_cpp import Llama


def main(model: str, questions: str, answers: str) -> None:
    """Answer every question."""
    asked = json.loads(Path(questions).read_text())
    llama = Llama(model, n_ctx=0, verbose=False)  # 0: the model's own context
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


if __name__ == "__main__":
    main(*sys.argv[1:])
