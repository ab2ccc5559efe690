"""The settings of each method, each a section of the recipe (`dpo.beta=0.2`)."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ..bounds import Bounds
from ..errors import UserError

DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
]
SMOOTHED = ("robust", "exo_pair")
"""The DPO losses that read `label_smoothing`."""


@dataclass(frozen=True)
class Dpo:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """Strength with which the trained model is kept close to the reference model."""
    loss: DpoLoss = "sigmoid"
    """Loss per pair. `sigmoid` is DPO's own; the others are TRL's losses that treat each pair separately: `hinge`
    (SLiC), `ipo` (arXiv:2310.12036, whose tau is beta), `robust` to wrong labels (arXiv:2403.00409), `exo_pair`
    (arXiv:2402.00856), `nca_pair`, `bco_pair`, `sppo_hard` (arXiv:2405.00675), `apo_zero` if the better answers are
    better than the model's own and `apo_down` if they are worse (arXiv:2408.06266), `discopop`, and `sigmoid_norm`,
    which is normalised by length."""
    precompute: bool = False
    """Compute the reference model's log-likelihoods of all pairs once, before the first step, instead of in every
    step. Only one model is held instead of two, and each step has one pass less."""
    label_smoothing: Annotated[float, Bounds(least=0, below=0.5)] = 0.0
    """For `robust`, the share of pairs whose labels are wrong, below 0.5; for `exo_pair`, its epsilon, such as 1e-3."""

    def check(self) -> None:
        """Refuse label smoothing that the loss does not read, or a loss that lacks it.

        Raises:
            UserError: names the key.
        """
        loss, smoothing = self.loss, self.label_smoothing
        if smoothing and loss not in SMOOTHED:
            read_by = " and ".join(SMOOTHED)
            raise UserError(
                f"dpo.label_smoothing={smoothing} with dpo.loss={loss}: only {read_by} read it; set "
                "dpo.label_smoothing=0."
            )
        if loss == "exo_pair" and not smoothing:
            raise UserError("dpo.loss=exo_pair: needs dpo.label_smoothing above 0, such as 1e-3.")


@dataclass(frozen=True)
class Kto:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """Strength with which the trained model is kept close to the reference model."""
    good_weight: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Weight of the answers labelled true; raise it if they are fewer than the others (the paper's equation 8)."""
    bad_weight: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Weight of the answers labelled false."""


@dataclass(frozen=True)
class Orpo:
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """Weight of the odds-ratio term relative to imitating the better answer; the paper's lambda."""


@dataclass(frozen=True)
class Simpo:
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=2)] = 2.0
    """Factor that turns the log-likelihood per token into a reward; far larger than in DPO, 2 to 10 in the paper."""
    gamma: Annotated[float, Bounds(least=0)] = 1.0
    """Margin by which the better answer's reward should exceed the other's; the authors start from half of beta."""


@dataclass(frozen=True)
class Grpo:
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and RLOO, run by TRL."""

    group_size: Annotated[int, Bounds(least=2)] = 8
    """Answers per prompt, which are compared with each other; `global_batch_size` counts answers."""
    loss: Literal["grpo", "dapo", "dr_grpo", "rloo"] = "grpo"
    """Loss over the answers. `grpo`, the paper's, weighs every answer the same; `dapo` (arXiv:2503.14476) weighs every
    token of a step the same; `dr_grpo` (arXiv:2503.20783) divides by the longest allowed length and works best with
    `scale=none`; `rloo` (arXiv:2402.14740) takes whole answers, compares each with the mean of the others, and adds the
    KL divergence to the reward."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of the advantages: the standard deviation of the group's rewards (the paper), that of all rewards of a
    step, or none. RLOO uses none."""
    beta: Annotated[float, Bounds(least=0)] = 0.0
    """Weight of the KL divergence from the model before training: 0.04 in the paper; 0 needs no second model."""
    epsilon: Annotated[float, Bounds(above=0, usual=0.2)] = 0.2
    """Largest relative change of the likelihood of a token (RLOO: of an answer) since its rollout before clipping."""
    epsilon_high: Annotated[float | None, Bounds(above=0, usual=0.28)] = None
    """Upper clipping bound, if it differs from `epsilon`: 0.28 in DAPO."""
    iterations: Annotated[int, Bounds(least=1)] = 1
    """Updates per rollout; the paper's mu. With 1 nothing is ever clipped."""
    temperature: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Sampling temperature: a higher value explores more."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 256
    """Longest answer in tokens; together with its prompt it has to fit into `sequence_length`."""
    mask_truncated: bool = False
    """Leave answers that reach `max_new_tokens` out of the loss (DAPO)."""
    reward_weights: str | None = None
    """Weights of the functions in `reward`, separated by commas (`1,0.2`). None gives each function the weight 1."""
    reward_seconds: Annotated[float, Bounds(above=0, most=86_400, usual=5)] = 5.0
    """Time limit of the reward functions for one answer, in seconds; an answer that takes longer has no reward."""
    gather: bool = True
    """Under ZeRO-3, gather the whole weights on every rank while it generates. `false` gathers layer by layer for every
    token, which is slow, for models that do not fit."""
    vllm: str | None = None
    """Address of a server that generates the answers (`http://HOST:8000`, started by `trl vllm-serve --model MODEL`).
    Not tested by this project: it needs a GPU for the server alone."""

    def check(self, global_batch_size: int, micro_batch_size: int, sequence_length: int) -> None:
        """Refuse groups, lengths and bounds that contradict each other.

        Raises:
            UserError: names the key and a value that fits the others.
        """
        if global_batch_size % self.group_size:
            unit = math.lcm(self.group_size, micro_batch_size)
            raise UserError(
                f"grpo.group_size={self.group_size}: global_batch_size={global_batch_size} answers do not make whole "
                f"groups; use global_batch_size={-(-global_batch_size // unit) * unit}, or a group_size that divides "
                f"{global_batch_size}."
            )
        if self.max_new_tokens >= sequence_length:
            raise UserError(
                f"grpo.max_new_tokens={self.max_new_tokens}: leaves no room for a prompt in "
                f"sequence_length={sequence_length}; use grpo.max_new_tokens={sequence_length // 2} or a larger "
                "sequence_length."
            )
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise UserError(f"grpo.epsilon_high={self.epsilon_high}: must be at least grpo.epsilon={self.epsilon}.")


@dataclass(frozen=True)
class Classify:
    """Sequence classification: cross-entropy over the classes of the training data."""

    class_weights: Literal["none", "balanced"] = "none"
    """`balanced`: weigh an example of a class with n of the N examples by N / (classes * n), as in scikit-learn, so
    that rare classes count as much as frequent ones; the weights average 1."""


@dataclass(frozen=True)
class Embed:
    """Embeddings by InfoNCE (van den Oord et al. 2018, arXiv:1807.03748) on cosine similarities.

    An anchor is compared with the texts of all ranks' micro-batches: raise `micro_batch_size` for more negatives.
    """

    temperature: Annotated[float, Bounds(above=0, usual=0.05)] = 0.05
    """Divisor of the similarities: 0.05 as in SimCSE (Gao et al. 2021, arXiv:2104.08821) and by default in
    sentence-transformers, whose `scale` of 20 is its inverse. A lower value gives the hardest texts more weight."""
    pooling: Literal["mean", "last"] = "mean"
    """Hidden states that become a text's vector: the `mean` of all tokens, or the `last` token, which is the only one
    that attends to the whole text if attention is causal."""


DistillLoss = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Distill:
    """Distillation: the model learns a teacher's distribution over the next token (Hinton et al. 2015, 1503.02531)."""

    teacher: str | None = None
    """The model to learn from: a folder, a Hub id, or with `top_k` the address of a vLLM server that has loaded it
    (`http://HOST:8000`). Its tokenizer must be that of the recipe's model."""
    teacher_quantization: Literal["none", "nf4"] = "none"
    """`nf4`: load the teacher's linear layers in 4 bits, whole on every rank. Otherwise ZeRO-3 shards the teacher like
    the model."""
    loss: DistillLoss = "forward_kl"
    """Divergence per token (Agarwal et al. 2023, arXiv:2306.13649). `forward_kl` of the teacher from the student covers
    everything that the teacher may write, `reverse_kl` concentrates on the teacher's likeliest tokens, and `jsd` is
    between the two."""
    beta: float = 0.5
    """For `jsd`, the teacher's weight in the average distribution with which both models are compared: above 0, where
    the loss becomes forward KL, and below 1, where it becomes reverse KL."""
    temperature: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Divisor of both models' logits: above 1 the teacher's unlikely tokens count more. The divergence is multiplied by
    the square of the temperature, so that its gradients keep their size relative to the cross-entropy's."""
    alpha: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Share of the cross-entropy with the data's own answers in the loss; the rest is the divergence. It is below 1,
    since 1 would be the variant `full`."""
    top_k: Annotated[int | None, Bounds(least=1)] = None
    """Compute this many of the teacher's likeliest tokens for all of the data once, before training, and then unload
    the teacher. All other tokens together count as one more outcome. None runs the teacher during training, together
    with the student."""
    cache: str | None = None
    """Folder for the teacher's likeliest tokens, which other runs on the same data can reuse. None keeps them in the
    run folder. Needs `top_k`."""
    on_policy: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """Share of the steps that learn from answers that the model has just written, sampled at temperature 1, instead of
    from the data's answers (Agarwal's lambda), so that the teacher corrects the model's own mistakes."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 256
    """Longest answer that the model writes for `on_policy`, in tokens; together with its prompt it has to fit into
    `sequence_length`."""

    @property
    def served(self) -> bool:
        """True if the teacher is on a server."""
        return str(self.teacher).startswith(("http://", "https://"))

    def check(self, streaming: bool, packs: bool, sequence_length: int) -> None:
        """Refuse values out of range, and settings that exclude each other.

        Raises:
            UserError: names the key.
        """
        if self.loss == "jsd" and not 0 < self.beta < 1:
            raise UserError(
                f"distill.beta={self.beta}: must be above 0 and below 1; use distill.loss=forward_kl instead of 0, and "
                "reverse_kl instead of 1."
            )
        if self.cache and self.top_k is None:
            raise UserError(
                f"distill.cache={self.cache}: whole distributions are too large to store; add distill.top_k=64."
            )
        if self.top_k and streaming:
            raise UserError(
                f"distill.top_k={self.top_k} with data.streaming=true: a stream cannot be read before training; remove "
                "one of the two."
            )
        if self.served:
            self._check_served()
        if self.on_policy:
            self._check_on_policy(streaming, packs, sequence_length)

    def _check_served(self) -> None:
        if self.top_k is None:
            raise UserError(
                f"distill.teacher={self.teacher}: a server returns only the likeliest tokens; add distill.top_k=20, "
                "vLLM's limit unless the server was started with another --max-logprobs."
            )
        for key, plain in (("teacher_quantization", "none"), ("temperature", 1)):
            if getattr(self, key) != plain:
                raise UserError(
                    f"distill.{key}={getattr(self, key)}: a teacher on a server computes as it was started; "
                    f"use distill.{key}={plain}."
                )

    def _check_on_policy(self, streaming: bool, packs: bool, sequence_length: int) -> None:
        for key, used, why, instead in (
            ("distill.top_k", self.top_k, "computes the data's answers before training", "remove one of the two"),
            ("distill.alpha", self.alpha, "imitates the data's answers", "remove one of the two"),
            (
                "data.streaming=true",
                streaming,
                "cannot be searched for prompts that are too long",
                "remove one of the two",
            ),
            ("packing=true", packs, "packs the data's answers, and new answers differ in length", "use packing=false"),
        ):
            if used:
                raise UserError(f"distill.on_policy={self.on_policy} with {key}, which {why}: {instead}.")
        if self.max_new_tokens >= sequence_length:
            raise UserError(
                f"distill.max_new_tokens={self.max_new_tokens}: leaves no room for a prompt in "
                f"sequence_length={sequence_length}; use distill.max_new_tokens={sequence_length // 2} or a larger "
                "sequence_length."
            )
