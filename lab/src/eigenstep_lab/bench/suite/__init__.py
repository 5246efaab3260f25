"""Train sixteen tasks of different families with every optimizer, and compare the held-out loss."""
