"""`eigenstep train` and `eigenstep tune`: settings, feeds, checkpoints, the loop."""
