"""Callables that replay CUDA graphs: ``make_graphed_callables``.

From the arguments to the replay: :mod:`.arguments` checks the caller's arguments, :mod:`.order` gives the order of
forwards and backwards, :mod:`.run` captures those of one callable, :mod:`.replay` calls them, and :mod:`.make` joins
these parts. Only :mod:`.recorder` knows CUDA's graphs.
"""
