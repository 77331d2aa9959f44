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
    return _at_least(1, text)


def count_or_none(text: str) -> int:
    """Read an argument that counts something, and may be 0.

    Parameters
    ----------
    text : str
        The argument.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is negative.
    """
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        message = f"must be {least} or more, got {number}"
        raise argparse.ArgumentTypeError(message)
    return number


# argparse shows these names in messages
count.__name__ = count_or_none.__name__ = "integer"
