"""Write a model as GGUF; runs in the serving environment, so it imports nothing of the project.

    python gguf_convert.py CONVERTER MODEL OUTPUT.gguf TYPE [PRE_TOKENIZER]

CONVERTER is the folder of llama.cpp's convert_hf_to_gguf.py. PRE_TOKENIZER is used if the converter does not recognise
the model's pre-tokenizer.
"""

import runpy
import sys
from pathlib import Path

import llama_cpp

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
