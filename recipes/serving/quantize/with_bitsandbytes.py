"""Quantise with bitsandbytes, in the training environment."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ...training import distributed


def save(whole: Path, folder: Path, scheme: str) -> None:
    """Write the model in `whole`, in 4-bit normal floats (`nf4`) or 8-bit integers (`int8`), to `folder`.

    fp32 models compute in bf16 then: bitsandbytes' 8-bit product is of 16-bit numbers only.
    """
    dtype = AutoModelForCausalLM.from_pretrained(whole, dtype="auto", device_map="meta").dtype
    compute = torch.bfloat16 if dtype == torch.float32 else dtype
    if scheme == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    place = str(distributed.device())
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=compute, quantization_config=config, device_map=place)
    model.save_pretrained(folder)
