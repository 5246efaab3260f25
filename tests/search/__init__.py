"""Tests of the search without gradients."""
