"""The methods' own settings, each a section of the recipe (`dpo.beta=0.2`)."""

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
"""The losses of DPO that read `label_smoothing`."""


@dataclass(frozen=True)
class Dpo:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """How strongly the trained model is kept close to the reference model."""
    loss: DpoLoss = "sigmoid"
    """`sigmoid` is DPO's own; the others are those of TRL that see each pair by itself: `hinge` (SLiC), `ipo`
    (arXiv:2310.12036, whose tau is beta), `robust` to wrong labels (arXiv:2403.00409), `exo_pair` (arXiv:2402.00856),
    `nca_pair`, `bco_pair`, `sppo_hard` (arXiv:2405.00675), `apo_zero` where the better answers are better than the
    model's own and `apo_down` where they are worse (arXiv:2408.06266), `discopop`, and `sigmoid_norm` by length."""
    precompute: bool = False
    """Compute what the reference model says of all pairs once, before the first step, instead of in every step: one
    model is held instead of two, and each step has one pass less."""
    label_smoothing: Annotated[float, Bounds(least=0, below=0.5)] = 0.0
    """Of `robust`, the share of pairs whose labels are wrong, below 0.5; of `exo_pair`, its epsilon, such as 1e-3."""

    def check(self) -> None:
        """Refuse a smoothing that the loss does not read.

        Raises:
            UserError: names the key.
        """
        loss, smoothing = self.loss, self.label_smoothing
        if smoothing and loss not in SMOOTHED:
            read_by = " and ".join(SMOOTHED)
            raise UserError(f"dpo.label_smoothing={smoothing} with dpo.loss={loss}: only {read_by} read it.")
        if loss == "exo_pair" and not smoothing:
            raise UserError("dpo.loss=exo_pair: needs dpo.label_smoothing above 0, such as 1e-3.")


@dataclass(frozen=True)
class Kto:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """How strongly the trained model is kept close to the reference model."""
    good_weight: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Weight of the answers labelled true; raise it where they are fewer (the paper's equation 8)."""
    bad_weight: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Weight of the answers labelled false."""


@dataclass(frozen=True)
class Orpo:
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """How much the odds of the answers weigh beside imitating the better one; the paper's lambda."""


@dataclass(frozen=True)
class Simpo:
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734), run by TRL."""

    beta: Annotated[float, Bounds(above=0, usual=2)] = 2.0
    """Scales the log-likelihood per token into a reward: far larger than in DPO, 2 to 10 in the paper."""
    gamma: Annotated[float, Bounds(least=0)] = 1.0
    """By how much the better answer's reward should exceed the other's; half of beta is where the authors start."""


@dataclass(frozen=True)
class Grpo:
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and RLOO, run by TRL."""

    group_size: Annotated[int, Bounds(least=2)] = 8
    """Answers per prompt, which are compared with each other; `global_batch_size` counts answers."""
    loss: Literal["grpo", "dapo", "dr_grpo", "rloo"] = "grpo"
    """`grpo` is the paper's: every answer counts the same. `dapo` (arXiv:2503.14476): every token of a step does;
    `dr_grpo` (arXiv:2503.20783): divided by the longest allowed length, best with `scale=none`; `rloo`
    (arXiv:2402.14740): whole answers, each compared with the mean of the others, and the KL in the reward."""
    scale: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group's rewards (the paper), that of all of a
    step, or nothing. RLOO divides by nothing."""
    beta: Annotated[float, Bounds(least=0)] = 0.0
    """Weight of the KL divergence from the model before training: 0.04 in the paper; 0 needs no second model."""
    epsilon: Annotated[float, Bounds(above=0, usual=0.2)] = 0.2
    """How far the likelihood of a token (RLOO: of an answer) may move from its rollout's before it is clipped."""
    epsilon_high: Annotated[float | None, Bounds(above=0, usual=0.28)] = None
    """The bound above, where it is another one: 0.28 in DAPO."""
    iterations: Annotated[int, Bounds(least=1)] = 1
    """Updates per rollout; the paper's mu. With 1 nothing is ever clipped."""
    temperature: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Of sampling: higher tries more."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 256
    """Longest answer in tokens; with its prompt it has to fit into `sequence_length`."""
    mask_truncated: bool = False
    """Leave answers that reach `max_new_tokens` out of the loss (DAPO)."""
    reward_weights: str | None = None
    """Of the functions in `reward`, with commas (`1,0.2`); None: 1 each."""
    reward_seconds: Annotated[float, Bounds(above=0, most=86_400, usual=5)] = 5.0
    """How long the reward functions may take for one answer; an answer that takes longer has no reward."""
    gather: bool = True
    """Under ZeRO-3: gather the whole weights on every rank while it generates. false: layer by layer for every token,
    slow, for models that do not fit."""
    vllm: str | None = None
    """Address of a server that generates instead (`http://HOST:8000`, started by `trl vllm-serve --model MODEL`).
    Untested here: it takes a GPU of its own."""

    def check(self, global_batch_size: int, micro_batch_size: int, sequence_length: int) -> None:
        """Refuse groups, lengths and bounds that contradict each other.

        Raises:
            UserError: names the key and a value that goes with the others.
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
    """Sequence classification: cross-entropy over the classes that the training data has."""

    class_weights: Literal["none", "balanced"] = "none"
    """`balanced`: an example of a class with n of N examples weighs N / (classes * n), as in scikit-learn, so that rare
    classes count as much as frequent ones; 1 on average."""


@dataclass(frozen=True)
class Embed:
    """Embeddings by InfoNCE (van den Oord et al. 2018, arXiv:1807.03748) on cosine similarities.

    The texts that an anchor has to tell its own from are those of all ranks' micro-batches: raise `micro_batch_size`.
    """

    temperature: Annotated[float, Bounds(above=0, usual=0.05)] = 0.05
    """What similarities are divided by; 0.05 as in SimCSE (Gao et al. 2021, arXiv:2104.08821) and by default in
    sentence-transformers, whose `scale` of 20 is its inverse. Lower looks more at the hardest texts."""
    pooling: Literal["mean", "last"] = "mean"
    """Which hidden states are a text's vector: the `mean` of all tokens', or the `last` token's, which alone has seen
    the whole text where attention is causal."""


DistillLoss = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Distill:
    """Distillation: the model learns a teacher's distribution over the next token (Hinton et al. 2015, 1503.02531)."""

    teacher: str | None = None
    """The model to learn from: a folder, a Hub id, or with `top_k` the address of a vLLM server that holds it
    (`http://HOST:8000`). Its tokenizer must be that of the recipe's model."""
    teacher_quantization: Literal["none", "nf4"] = "none"
    """`nf4`: the teacher's linear layers in 4 bits, whole on every rank; otherwise ZeRO-3 shards it like the model."""
    loss: DistillLoss = "forward_kl"
    """The divergence per token (Agarwal et al. 2023, arXiv:2306.13649). `forward_kl` of the teacher from the student
    spreads over everything that the teacher would say, `reverse_kl` concentrates on its likeliest, `jsd` is between."""
    beta: float = 0.5
    """Of `jsd`, the teacher's weight in the mixture that both are compared with: above 0, where it becomes forward KL,
    and below 1, where it becomes reverse KL."""
    temperature: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Both models' logits are divided by it: above 1 the teacher's unlikely tokens count more. The divergence is
    multiplied by its square, so that its gradients keep their size beside the cross-entropy's."""
    alpha: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Share of the cross-entropy with the data's own answers in the loss; the rest is the divergence. Below 1: at 1 it
    is the variant `full`."""
    top_k: Annotated[int | None, Bounds(least=1)] = None
    """Compute the teacher's so many likeliest tokens for the whole data once, before training, and then let go of the
    teacher. All other tokens together are one outcome more. None: the teacher computes beside the student."""
    cache: str | None = None
    """Folder for them, to be used again by other runs on the same data; None: the run's own. Needs `top_k`."""
    on_policy: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """Share of the steps that learn from answers which the model has just written itself, sampled at temperature 1, and
    not from the data's (Agarwal's lambda): so it is corrected where its own mistakes lead."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 256
    """Longest answer that it writes then, in tokens; with its prompt it has to fit into `sequence_length`."""

    @property
    def served(self) -> bool:
        """Whether the teacher is on a server."""
        return str(self.teacher).startswith(("http://", "https://"))

    def check(self, streaming: bool, packs: bool, sequence_length: int) -> None:
        """Refuse shares out of range, and what does not go together.

        Raises:
            UserError: names the key.
        """
        if self.loss == "jsd" and not 0 < self.beta < 1:
            raise UserError(
                f"distill.beta={self.beta}: must be above 0 and below 1; use distill.loss=forward_kl instead of 0, and "
                "reverse_kl instead of 1."
            )
        if self.cache and self.top_k is None:
            raise UserError(f"distill.cache={self.cache}: needs distill.top_k, such as 64: whole ones are huge.")
        if self.top_k and streaming:
            raise UserError(
                "distill.top_k with data.streaming=true: a stream cannot be read beforehand; leave one out."
            )
        if self.served:
            self._check_served()
        if self.on_policy:
            self._check_on_policy(streaming, packs, sequence_length)

    def _check_served(self) -> None:
        if self.top_k is None:
            raise UserError(
                f"distill.teacher={self.teacher}: a server only says its likeliest tokens; add distill.top_k=20, "
                "vLLM's limit unless it was started with another --max-logprobs."
            )
        for key, plain in (("teacher_quantization", "none"), ("temperature", 1)):
            if getattr(self, key) != plain:
                raise UserError(
                    f"distill.{key}={getattr(self, key)}: a teacher on a server computes as it was started; "
                    f"use distill.{key}={plain}."
                )

    def _check_on_policy(self, streaming: bool, packs: bool, sequence_length: int) -> None:
        for key, used, why, instead in (
            ("distill.top_k", self.top_k, "computes the data's answers before training", "leave one out"),
            ("distill.alpha", self.alpha, "imitates the data's answers", "leave one out"),
            ("data.streaming=true", streaming, "cannot be searched for prompts that are too long", "leave one out"),
            ("packing=true", packs, "lays answers end to end, and new ones are of other lengths", "use packing=false"),
        ):
            if used:
                raise UserError(f"distill.on_policy={self.on_policy} with {key}, which {why}: {instead}.")
        if self.max_new_tokens >= sequence_length:
            raise UserError(
                f"distill.max_new_tokens={self.max_new_tokens}: leaves no room for a prompt in "
                f"sequence_length={sequence_length}; use distill.max_new_tokens={sequence_length // 2} or a larger "
                "sequence_length."
            )
