"""Decode of multi-head latent attention over a paged latent cache."""

from .decode import mla_decode, plan_mla_decode
from .plan import MlaDecodePlan

__all__ = ["MlaDecodePlan", "mla_decode", "plan_mla_decode"]
