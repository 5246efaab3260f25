"""The core: spectral matrices, curvature, and the step of learning that all else is built on.

Nothing is imported here, so that the NumPy side can be used without torch; the public names are in
``eigenstep``.
"""
