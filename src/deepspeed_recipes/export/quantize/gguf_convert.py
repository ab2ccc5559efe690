"""Write a model as GGUF; runs in the serving environment, so it imports nothing of the project.

    python gguf_convert.py CONVERTER MODEL OUTPUT.gguf TYPE [PRE_TOKENIZER]

CONVERTER is the folder of llama.cpp's convert_hf_to_gguf.py. PRE_TOKENIZER is used if the converter does not recognise
the model's pre-tokenizer.
"""

import re
import runpy
import sys
from pathlib import Path

import llama_cpp
from safetensors import safe_open

CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""Types that the converter writes itself; llama.cpp quantises to all others."""


def main(converter: str, model: str, output: str, kind: str, pre_tokenizer: str | None = None) -> None:
    """Write MODEL as OUTPUT."""
    sys.path[:0] = [converter, str(Path(converter) / "gguf-py")]
    from conversion import base

    known = base.TextModel.get_vocab_base_pre

    def of(self, tokenizer):
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            if pre_tokenizer is None:
                raise
            return pre_tokenizer

    # llama.cpp identifies a pre-tokenizer by a digest of its tokens for a text, and has no option to choose one.
    base.TextModel.get_vocab_base_pre = of
    loaded = base.ModelBase.load_hparams

    def with_rotary(*arguments, **options):
        """Add MiniMax's name of a size that transformers 5 writes as a share of the head."""
        found = loaded(*arguments, **options)
        share = (found.get("rope_parameters") or {}).get("partial_rotary_factor")
        return {"rotary_dim": int(share * found["head_dim"]), **found} if share and found.get("head_dim") else found

    base.ModelBase.load_hparams = staticmethod(with_rotary)
    # The converter expects a head for further tokens wherever config.json, or transformers' default, names one.
    names = " ".join(" ".join(safe_open(file, "np").keys()) for file in Path(model).glob("*.safetensors"))
    base.ModelBase.no_mtp = re.search(r"mtp|nextn|\.eh_proj\.", names) is None
    direct = kind in CONVERTED
    written = output if direct else f"{output}.f32"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", written, "--outtype", kind if direct else "f32"]
    runpy.run_path(str(Path(converter) / sys.argv[0]), run_name="__main__")
    if not direct:
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
        status = llama_cpp.llama_model_quantize(written.encode(), output.encode(), settings)
        Path(written).unlink()
        if status:
            raise SystemExit(f"Error: llama.cpp cannot quantise this model to {kind} (status {status})")


if __name__ == "__main__":
    main(*sys.argv[1:])
