"""Callables that replay CUDA graphs: ``make_graphed_callables``.

From the arguments to the replay: :mod:`.arguments` checks what the caller gives, :mod:`.order` says which forwards and
backwards are captured when, :mod:`.run` captures those of one callable, :mod:`.replay` calls them, and
:mod:`.make` puts it together. :mod:`.recorder` alone knows CUDA's graphs.
"""
