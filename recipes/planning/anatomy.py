"""What planning knows of a model: the sizes of its parts, and what its layers do to memory and arithmetic.

Frozen data that costs nothing to import; `trace.py` makes it from the Hugging Face class itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps of one layer between its forward and its backward pass, on one rank, in bf16.

    For `rows` rows of `length` tokens: `rows * (per_token * length + per_pair * length**2) + fixed`.
    """

    per_token: float
    per_pair: float = 0.0
    """Per pair of tokens of a row: scores of eager attention, the gates of linear attention's chunks."""
    fixed: float = 0.0
    """Whatever the batch."""

    def of(self, rows: float, length: float) -> float:
        """Return the bytes for a batch."""
        return rows * (self.per_token * length + self.per_pair * length**2) + self.fixed


@dataclass(frozen=True)
class Kind:
    """One kind of decoder layer: a model has one or a few (sliding and full attention, dense and expert)."""

    parameters: int
    split: int
    """Of the parameters, those in matrices that tensor parallelism splits."""
    routed: int
    """Of the parameters, those in experts, of which a token uses some."""
    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of every linear layer, which is what adapters on all of them are added to."""
    multiplied: float
    """Weights that a token is multiplied with: all in matrices, but of the experts only those it uses."""
    attention_width: int
    """Heads x their width; causal attention costs 2 x width x length forward per token. 0: it has none (linear)."""
    window: int | None
    """Tokens that one attends to at most; None: all before it."""
    chosen: int = 0
    """Experts that a token is sent to; 0: the layer has none."""
    saved: Mapping[str, Saved] = field(default_factory=dict)
    """What autograd keeps, by how the layer is trained; `trace.py` says which ways there are."""
    checkpoint: int = 0
    """Bytes per token that checkpointing keeps of the layer: its input, in bf16."""


@dataclass(frozen=True)
class Anatomy:
    """A decoder taken apart."""

    model_type: str
    hidden: int
    vocabulary: int
    heads: int
    key_value_heads: int
    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    """By layer, from the first: which of `kinds` it is."""
    embedding: int
    """Parameters before the first layer."""
    head: int
    """Parameters after the last: norm and output matrix, which counts for nothing where it is tied."""
    tied: bool
    """The output matrix is the embedding's."""

    @property
    def layers(self) -> tuple[Kind, ...]:
        """Every layer, from the first."""
        return tuple(self.kinds[index] for index in self.order)

    @property
    def parameters(self) -> int:
        """In all."""
        return self.embedding + self.head + sum(layer.parameters for layer in self.layers)
