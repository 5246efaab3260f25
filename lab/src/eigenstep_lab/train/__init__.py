"""`eigenstep train` and `eigenstep tune`: settings, data feeds, checkpoints, several processes, and
the loop itself.
"""
