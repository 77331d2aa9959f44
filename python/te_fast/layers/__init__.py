"""The layers: each a native program, its parameters, and what their checkpoints keep."""
