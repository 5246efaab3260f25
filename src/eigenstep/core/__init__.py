"""The core: spectral matrices, curvature, and the one step of learning that everything else is
built on.

Nothing is imported here, so that the NumPy side can be used without torch; the public names are in
``eigenstep``.
"""
