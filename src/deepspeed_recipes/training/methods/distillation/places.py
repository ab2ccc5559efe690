"""Finds the places of a batch at which a next token is in the loss, on the host: a device would have to wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....recipe.files import Json
from ...data.collate import IGNORED, Batch, Collator, next_labels

PLACES, TARGETS = "places", "targets"
"""Keys of a batch: numbers of tokens when all sequences are concatenated, and the token after each, [places]."""
TOKENS, LOG_PROBS = "likeliest", "log_probs"
"""The teacher's likeliest tokens at each place, [places, k], and the log-probabilities of these and of all others,
[places, k + 1], or [places, k] where k is the whole vocabulary; in a sequence the same, flat."""


@dataclass(frozen=True)
class PlacesCollator:
    """Collates sequences, and adds the places in the loss."""

    collator: Collator
    top_k: int | None = None
    """Number of the teacher's likeliest tokens in the sequences, or None if they have none."""

    def __call__(self, sequences: Sequence[Json]) -> Batch:
        """Return the collator's batch with the places, and the tokens and log-probabilities at each of them."""
        inputs = self.collator(sequences)
        labels = next_labels(inputs["labels"]).flatten()
        places = (labels != IGNORED).nonzero()[:, 0]
        found = {PLACES: places, TARGETS: labels[places]}
        if self.top_k and TOKENS in sequences[0]:
            flat = {name: np.concatenate([one[name] for one in sequences]) for name in (TOKENS, LOG_PROBS)}
            found[TOKENS] = torch.from_numpy(flat[TOKENS]).long().view(-1, self.top_k)
            found[LOG_PROBS] = torch.from_numpy(flat[LOG_PROBS]).view(len(places), -1)
        return {**inputs, **found}
