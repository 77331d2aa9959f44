"""Arguments of command lines."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Read an argument that counts something.

    Parameters
    ----------
    text : str
        The argument.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is less than 1.
    """
    number = int(text)
    if number < 1:
        message = f"must be 1 or more, got {number}"
        raise argparse.ArgumentTypeError(message)
    return number


count.__name__ = "integer"  # argparse shows this name in messages
