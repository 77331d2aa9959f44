"""Mixtures of experts: move rows to their experts and back, pad them for grouped GEMMs, and route tokens."""
