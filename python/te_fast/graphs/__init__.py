"""Programs in graphs: what ``torch.compile``, ``torch.export`` and fake tensors see of a layer."""
