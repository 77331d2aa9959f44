"""Mixtures of experts: rows moved to their experts and back, and padded for grouped GEMMs."""
