"""The layers: each has a native program, parameters, and a state in checkpoints."""
