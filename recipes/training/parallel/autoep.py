"""DeepSpeed's AutoEP, which spreads a mixture's experts. DeepSpeed before 0.19.2 has none: no layer is of its kinds."""

from ...spec.errors import UserError

try:
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter
except ImportError:
    AutoEP = parse_autoep_config = None
    AutoEPMoELayer = TokenChoiceTopKRouter = type("NoSuchLayer", (), {})

__all__ = ["AutoEP", "AutoEPMoELayer", "TokenChoiceTopKRouter", "parse_autoep_config", "require"]


def require() -> None:
    """Check that DeepSpeed has it.

    Raises:
        UserError: the installed version is too old.
    """
    if AutoEP is None:
        raise UserError("layout.expert needs DeepSpeed 0.19.2 or later: pip install -U deepspeed, or layout.expert=1.")
