"""Checkpoints are pickles, which can run code when they are loaded: here only tensors and plain values are loaded.

DeepSpeed 0.19.8 reads every file with `torch.load(weights_only=False)`. torch has a variable that overrules callers.
"""

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ...recipe.errors import UserError, first_line

STORED = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""The classes that DeepSpeed stores besides tensors and plain values; all of them only hold numbers."""


def load_only_data() -> None:
    """Make every `torch.load` of this process and its children refuse whatever is not data."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals(list(STORED))


@contextlib.contextmanager
def refusing_code(checkpoint: Path | None) -> Iterator[None]:
    """Explain why `checkpoint` was not loaded, during a `with` block.

    Raises:
        UserError: it stores something that is not data.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else first_line(error)
        raise UserError(
            f"{checkpoint}: not loaded, since one of its files stores {what}, which is no data and may run code; "
            f"delete the folder, or start a new run from its weights: without --resume, with model.path={checkpoint}."
        ) from error
