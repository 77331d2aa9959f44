"""Layers that ranks share: their groups and sizes, and native programs between collectives."""
