"""The state of delayed scaling in checkpoints: te_fast's own format, and a reader of Transformer Engine's."""
