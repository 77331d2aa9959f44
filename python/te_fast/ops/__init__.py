"""Operations that fuse: groups of them, planned as native programs and Python's operations, and run."""
