"""Optimizers that precondition gradients with learned curvature."""

from .spectral import Spectral

__all__ = ["Spectral"]
