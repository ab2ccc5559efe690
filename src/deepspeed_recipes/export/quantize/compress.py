"""Quantise a model with llm-compressor; runs in the serving environment, so it imports nothing of the project.

    python compress.py MODEL OUTPUT SCHEME [CALIBRATION]

CALIBRATION is JSON: a list of token ids for each sequence. Without it only the weights are used.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main(model_folder: str, output: str, scheme: str, calibration: str | None = None) -> None:
    """Write MODEL, quantised, to OUTPUT."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
    config._attn_implementation = None  # the file may name a FlashAttention that is not installed here
    model = AutoModelForCausalLM.from_pretrained(model_folder, config=config, dtype="auto", trust_remote_code=False)
    # In the head small differences change tokens, and the head's weight is often the embedding's too.
    chosen = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
    if calibration is None:
        oneshot(model=model, recipe=QuantizationModifier(**chosen))
    else:
        sequences = json.loads(Path(calibration).read_text())
        columns = {"input_ids": sequences, "attention_mask": [[1] * len(sequence) for sequence in sequences]}
        oneshot(
            model=model,
            tokenizer=AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False),
            dataset=Dataset.from_dict(columns),
            recipe=GPTQModifier(**chosen),
            max_seq_length=max(map(len, sequences)),
            num_calibration_samples=len(sequences),
        )
    model.save_pretrained(output, save_compressed=True)
    for file in Path(output).glob("*.safetensors"):  # which safetensors 0.8 writes for their owner alone
        file.chmod(Path(output, "config.json").stat().st_mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
