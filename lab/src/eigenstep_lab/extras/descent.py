"""A rule for ``minimize_spd`` with less memory: ``method=BarzilaiBorwein``."""

from torch import Tensor

from eigenstep.manifold.point import Point


class BarzilaiBorwein:
    """Follow the gradient, scaled by the curvature along the previous step."""

    window = 10

    def __init__(self) -> None:
        """Start with the gradient itself."""
        self._rate, self._long = 1.0, False

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return a multiple of the negative gradient."""
        return -self._rate * gradient

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Estimate the curvature along the step; go further where it is not positive."""
        curvature = step.dot(change).item()
        self._long = not self._long
        if curvature <= 0:
            self._rate *= 2
        elif self._long:
            self._rate = step.dot(step).item() / curvature
        else:
            self._rate = curvature / change.dot(change).item()
