"""Spectral on many processes: who owns what, how gradients and steps travel, and what a checkpoint
holds.
"""
