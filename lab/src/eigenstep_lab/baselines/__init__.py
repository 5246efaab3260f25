"""What we compare with. Each scheme is written for clarity, in the terms of its own paper.

Schemes that learn a matrix share one small protocol with ours: a frozen object with ``matmul`` and
``dense``, and a function ``update(S, curvature, *, lr, decay)`` that returns the next one, like
``eigenstep.update``.
"""
