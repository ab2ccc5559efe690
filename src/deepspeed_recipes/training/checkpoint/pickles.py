"""Loads only tensors and plain values from checkpoints, which are pickles and could run code.

DeepSpeed 0.19.8 reads every file with `torch.load(weights_only=False)`; a variable of torch overrules that.
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
"""Classes that DeepSpeed stores in addition to tensors and plain values; all of them hold only numbers."""


def load_only_data() -> None:
    """Make every `torch.load` of this process and its children refuse everything except data."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals(list(STORED))


@contextlib.contextmanager
def refusing_code(checkpoint: Path | None) -> Iterator[None]:
    """Within a `with` block, explain why `checkpoint` was not loaded.

    Raises:
        UserError: the checkpoint contains something that is not data.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else first_line(error)
        raise UserError(
            f"{checkpoint}: not loaded: one of its files contains {what}, which is code rather than data; "
            f"delete the folder, or start a new run from its weights: without --resume, with model.path={checkpoint}."
        ) from error
