"""The places of a batch at which a next token is in the loss, found on the host: the device would wait for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...data.collate import IGNORED, Collator, next_labels

PLACES, TARGETS = "places", "targets"
"""Of a batch: numbers of tokens, all sequences laid end to end, and the token that follows each, [places]."""
TOKENS, LOG_PROBS = "likeliest", "log_probs"
"""The teacher's likeliest tokens at each place, [places, k], and their log-probabilities and that of all others,
[places, k + 1], or [places, k] where k is the whole vocabulary; of a sequence the same, flat."""


@dataclass(frozen=True)
class PlacesCollator:
    """Collates sequences, and says where the loss is."""

    collator: Collator
    top_k: int | None = None
    """How many of the likeliest tokens the sequences have; None: they have none."""

    def __call__(self, sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what the collator does, the places, and what is at each of them."""
        inputs = self.collator(sequences)
        labels = next_labels(inputs["labels"]).flatten()
        places = (labels != IGNORED).nonzero()[:, 0]
        found = {PLACES: places, TARGETS: labels[places]}
        if self.top_k and TOKENS in sequences[0]:
            flat = {name: np.concatenate([one[name] for one in sequences]) for name in (TOKENS, LOG_PROBS)}
            found[TOKENS] = torch.from_numpy(flat[TOKENS]).long().view(-1, self.top_k)
            found[LOG_PROBS] = torch.from_numpy(flat[LOG_PROBS]).view(len(places), -1)
        return {**inputs, **found}
