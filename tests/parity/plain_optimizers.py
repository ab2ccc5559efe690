"""The references of optimizers and rates, each by itself on whole weights, in plain PyTorch, PEFT or bitsandbytes."""

import math
import re

import torch
from bitsandbytes.optim import AdamW8bit
from peft.optimizers import create_loraplus_optimizer

from tests.parity import plain

RANKS = 2


class Muon:
    """Muon by its paper's formulas (arXiv:2502.16982), and AdamW for the embedding and norms.

    Mistakes: `adamw`, no matrix gets Muon; `rate`, the updates have their own size; `nesterov`, none;
    `decay`, decay at the scaled rate.
    """

    def __init__(self, model, settings, mistake=""):
        decayed, exempt = plain.groups(model, settings)
        embedding = model.get_input_embeddings().weight
        chosen = [weight for weight in decayed["params"] if weight is not embedding and mistake != "adamw"]
        rest = [weight for weight in decayed["params"] if all(weight is not one for one in chosen)]
        groups = [{**decayed, "params": rest}, exempt]
        self.adam = torch.optim.AdamW(groups, lr=settings.learning_rate, eps=settings.epsilon)
        self.momenta = {weight: torch.zeros_like(weight) for weight in chosen}
        self.settings, self.mistake = settings, mistake

    def zero_grad(self):
        self.adam.zero_grad()
        for weight in self.momenta:
            weight.grad = None

    @torch.no_grad()
    def step(self):
        self.adam.step()
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        for weight, momentum in self.momenta.items():
            momentum.mul_(0.95).add_(weight.grad, alpha=0.05)
            ahead = momentum if self.mistake == "nesterov" else 0.05 * weight.grad + 0.95 * momentum
            factor = 1 if self.mistake == "rate" else 0.2 * math.sqrt(max(weight.shape))
            weight.mul_(1 - rate * decay * (factor if self.mistake == "decay" else 1))
            weight.add_(orthogonal(ahead), alpha=-rate * factor)


def orthogonal(matrix):
    """Return Newton and Schulz' fifth power of the matrix's directions, five times (Jordan et al. 2024)."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.T if matrix.shape[0] > matrix.shape[1] else found


class EightBit:
    """bitsandbytes' AdamW on the pieces that each ZeRO rank has, since it quantises blocks of 256 numbers of a piece.

    Mistakes: `states`, moments in 32 bits; `blocks`, each weight by itself.
    """

    def __init__(self, model, settings, stage, mistake=""):
        self.pieces = []
        groups = []
        for group in plain.groups(model, settings):
            pieces = self._pieces(group["params"], stage, mistake)
            flat = [torch.zeros(sum(end - start for _, start, end in piece)).requires_grad_() for piece in pieces]
            self.pieces += zip(flat, pieces, strict=True)
            groups.append({"params": flat, "weight_decay": group["weight_decay"]})
        kind = torch.optim.AdamW if mistake == "states" else AdamW8bit
        self.optimizer = kind(groups, lr=settings.learning_rate, eps=settings.epsilon)
        self.model = model

    def zero_grad(self):
        self.model.zero_grad()

    @torch.no_grad()
    def step(self):
        for flat, piece in self.pieces:
            flat.copy_(torch.cat([padded(weight, end)[start:end] for weight, start, end in piece]))
            flat.grad = torch.cat([padded(weight.grad, end)[start:end] for weight, start, end in piece])
        self.optimizer.step()
        for flat, piece in self.pieces:
            parts = flat.split([end - start for _, start, end in piece])
            for (weight, start, end), part in zip(piece, parts, strict=True):
                own = weight.view(-1)[start:end]
                own.copy_(part[: len(own)])

    @staticmethod
    def _pieces(weights, stage, mistake):
        """Return lists of (weight, start, end): without ZeRO whole weights; halves of each, or of all together."""
        if stage == 0 or mistake == "blocks":
            return [[(weight, 0, weight.numel())] for weight in weights]
        if stage == 3:
            halves = {weight: -(-weight.numel() // RANKS) for weight in weights}
            return [[(one, rank * half, (rank + 1) * half) for one, half in halves.items()] for rank in range(RANKS)]
        half, first, pieces = -(-sum(weight.numel() for weight in weights) // (2 * RANKS)) * 2, 0, [[], []]
        for weight in weights:
            for rank, piece in enumerate(pieces):
                start, end = max(rank * half - first, 0), min((rank + 1) * half - first, weight.numel())
                if start < end:
                    piece.append((weight, start, end))
            first += weight.numel()
        return pieces


def padded(values, length):
    """Return numbers in a row, with zeros up to a length."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, max(0, length - len(flat))))


def layer_wise(model, settings, decay):
    """Return AdamW whose rate falls by `decay` with each layer from the head down."""
    layers, groups = model.config.num_hidden_layers, []
    for group, decays in zip(plain.groups(model, settings), (settings.weight_decay, 0.0), strict=True):
        names = {weight: name for name, weight in model.named_parameters()}
        for weight in group["params"]:
            layer = re.search(r"layers\.(\d+)\.", names[weight])
            below = layers - int(layer[1]) if layer else layers + 1 if "embed" in names[weight] else 0
            groups.append({"params": [weight], "weight_decay": decays, "lr": settings.learning_rate * decay**below})
    return torch.optim.AdamW(groups, eps=settings.epsilon)


def lora_plus(model, settings, ratio):
    """Return PEFT's optimizer for LoRA+."""
    options = {"lr": settings.learning_rate, "eps": settings.epsilon, "loraplus_weight_decay": settings.weight_decay}
    return create_loraplus_optimizer(model, torch.optim.AdamW, loraplus_lr_ratio=ratio, **options)
