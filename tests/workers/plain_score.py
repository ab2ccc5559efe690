"""Scores a model folder by exact match with plain transformers, as a stranger to this project would.

usage: plain_score.py MODEL_DIR HELD_OUT_JSONL      (prints the share of answers reproduced exactly)
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    folder, data = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    conversations = [json.loads(line)["messages"] for line in Path(data).read_text(encoding="utf-8").splitlines()]
    right = 0
    for *question, answer in conversations:
        chat = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            said = model.generate(**chat, max_new_tokens=96, do_sample=False)[0, chat["input_ids"].shape[1] :]
        right += tokenizer.decode(said, skip_special_tokens=True) == answer["content"]
    print(right / len(conversations))
