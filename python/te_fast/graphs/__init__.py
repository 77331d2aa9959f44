"""Programs as operators of graphs, for ``torch.compile``, ``torch.export`` and fake tensors."""
