"""Where curvature comes from: losses, models, samples and problems over positive-definite matrices.

Each function returns ``eigenstep.OuterProducts`` or ``eigenstep.Dense``, through which no gradients
flow back; your own matrix needs none of them: ``Dense(H)``.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.func import grad, jacrev, vjp, vmap
from torch.func import hessian as func_hessian

from .checks import check_finite, check_nonempty, check_size, check_symmetric
from .curvature import Dense, OuterProducts
from .matrices import SPD
from .step import symmetrize

Predict = Callable[[Tensor, Tensor], Tensor]
"""A model for one example: ``predict(parameters, input)``, shape ``(C,)``."""


def gradient_outer_product(gradient: Tensor) -> OuterProducts:
    """Return ``g g^T``, the curvature of Adam, Shampoo and their kin.

    The gradient has shape ``(*batch, *sizes)``.
    """
    check_finite(gradient, "gradient")
    return OuterProducts(gradient[None])


def per_example_gradients(gradients: Tensor) -> OuterProducts:
    """Return ``1/K sum_k g_k g_k^T``, the empirical Fisher matrix.

    The gradients have shape ``(K, *batch, *sizes)``.
    """
    check_nonempty(gradients, "gradients")
    check_finite(gradients, "gradients")
    return _mean(gradients)


@torch.no_grad()
def hessian(loss: Callable[[Tensor], Tensor], parameters: Tensor) -> Dense:
    """Return the Hessian of a scalar function at a tensor of any shape.

    ``torch.func`` must be able to differentiate it twice.
    """
    check_finite(parameters, "parameters")
    size = parameters.numel()
    return Dense(symmetrize(func_hessian(loss)(parameters).reshape(size, size)))


@torch.no_grad()
def gauss_newton(
    predict: Predict,
    loss: Callable[[Tensor, Tensor], Tensor],
    parameters: Tensor,
    inputs: Tensor,
    targets: Tensor,
) -> OuterProducts:
    """Return the Gauss-Newton matrix ``1/K sum_k J_k^T L_k J_k``.

    ``J_k`` is the Jacobian of the model, ``L_k`` the Hessian of a convex loss. The outer products
    are the columns of ``J_k^T L_k^(1/2)``, ``C`` for each example.

    Args:
        predict: the model for one example, ``predict(parameters, input)`` of shape ``(C,)``.
        loss: the loss of one example, ``loss(output, target)``, convex in the output.
        parameters: where to evaluate, any shape.
        inputs: examples along the first axis.
        targets: what the loss compares with, along the first axis.
    """
    check_finite(parameters, "parameters")
    check_nonempty(inputs, "inputs")
    if len(targets) != len(inputs):
        raise ValueError(
            f"targets must hold one entry for each of the {len(inputs)} inputs, got {len(targets)}"
        )
    jacobians = vmap(jacrev(predict), (None, 0))(parameters, inputs)
    outputs = vmap(predict, (None, 0))(parameters, inputs)
    curvatures = vmap(func_hessian(loss))(outputs, targets)
    values, vectors = torch.linalg.eigh(curvatures)
    roots = vectors * values.clamp_min(0).sqrt()[..., None, :]
    columns = torch.einsum("kc...,kcr->kr...", jacobians, roots).flatten(0, 1)
    return _mean(columns, len(inputs))


@torch.no_grad()
def sampled_fisher(
    predict: Predict,
    distribution: Callable[[Tensor], Distribution],
    parameters: Tensor,
    inputs: Tensor,
    draws: int = 1,
) -> OuterProducts:
    """Return an estimate of the Fisher matrix with labels drawn from the model's predictions.

    Args:
        predict: as for ``gauss_newton``.
        distribution: turns outputs of shape ``(K, C)`` into a distribution over labels, for example
            ``lambda f: torch.distributions.Categorical(logits=f)``.
        parameters: as for ``gauss_newton``.
        inputs: as for ``gauss_newton``.
        draws: labels to draw for each example. ``torch.manual_seed`` makes them reproducible.
    """
    check_finite(parameters, "parameters")
    check_nonempty(inputs, "inputs")
    check_size(draws, "draws")

    def pull_back(x: Tensor, score: Tensor) -> Tensor:
        return vjp(lambda p: predict(p, x), parameters)[1](score)[0]

    examples = torch.cat([inputs] * draws)
    outputs = vmap(predict, (None, 0))(parameters, examples)
    labels = distribution(outputs).sample()
    scores = grad(lambda f: distribution(f).log_prob(labels).sum())(outputs)
    return _mean(vmap(pull_back)(examples, scores))


def reinforce(S: SPD, deviations: Tensor, values: Tensor) -> OuterProducts:
    """Return the estimate of the mean Hessian under a Gaussian from function values alone.

    For ``w`` drawn with mean ``m`` and inverse covariance ``S``, the estimate is the mean of
    ``l(w) (S (w - m)(w - m)^T S - S)``. Subtracting a baseline from the values lowers its variance.

    Args:
        S: inverse covariance of the samples.
        deviations: ``w_k - m``, shape ``(K, *batch, *sizes)``.
        values: ``l(w_k)`` or rank-based utilities, shape ``(K,)`` or ``(K, *batch)``.
    """
    _check_deviations(S, deviations)
    check_finite(values, "values")
    if values.shape not in (deviations.shape[:1], deviations.shape[: 1 + len(S.batch_shape)]):
        wanted = f"the leading shape (K,) or (K, *batch) of deviations {tuple(deviations.shape)}"
        raise ValueError(f"values must have {wanted}, got {tuple(values.shape)}")
    weights = values / len(deviations)
    return OuterProducts(S.matmul(deviations), weights, shift=-weights.sum(0), semidefinite=False)


def reparametrization(S: SPD, deviations: Tensor, gradients: Tensor) -> OuterProducts:
    """Return the estimate of the mean Hessian under a Gaussian from gradients at samples.

    The mean of ``S (w - m) g(w)^T``, made symmetric (Stein's identity). Each such product of ``a``
    and ``b`` is a difference of two outer products, ``(a + b)(a + b)^T / 4 - (a - b)(a - b)^T /
    4``.

    Args:
        S: inverse covariance of the samples.
        deviations: ``w_k - m``, shape ``(K, *batch, *sizes)``.
        gradients: gradients at ``w_k``, same shape.
    """
    _check_deviations(S, deviations)
    check_finite(gradients, "gradients")
    a = S.matmul(deviations)
    b = gradients
    if a.shape != b.shape:
        raise ValueError(
            f"gradients must have the shape of deviations, {tuple(a.shape)}, got {tuple(b.shape)}"
        )
    # Vectors of equal length lose the least to rounding in the difference of the two products.
    axes = tuple(range(1 + len(S.batch_shape), a.ndim))
    tiny = torch.finfo(a.dtype).tiny
    lengths = [torch.linalg.vector_norm(x, dim=axes, keepdim=True).clamp_min(tiny) for x in (a, b)]
    balance = (lengths[1] / lengths[0]).sqrt()
    a = a * balance
    b = b / balance
    quarter = torch.full((len(a),), 0.25 / len(a), dtype=a.dtype, device=a.device)
    return OuterProducts(
        torch.cat([a + b, a - b]), torch.cat([quarter, -quarter]), semidefinite=False
    )


def spd_gradient(S: SPD, gradient: Tensor) -> Dense:
    """Return ``-2 S (dl/dS) S``, curvature that minimizes a function of ``S``.

    Use it with ``decay=0``; then the update is Riemannian gradient descent. The gradient ``dl/dS``
    is symmetric.
    """
    check_symmetric(gradient, "gradient")
    dense = S.dense()
    if gradient.shape != dense.shape:
        raise ValueError(
            f"gradient must have shape {tuple(dense.shape)} to fit S, got {tuple(gradient.shape)}"
        )
    return Dense(symmetrize(-2 * dense @ gradient.to(dense.dtype) @ dense))


def _mean(vectors: Tensor, count: int | None = None) -> OuterProducts:
    return OuterProducts(vectors / (len(vectors) if count is None else count) ** 0.5)


def _check_deviations(S: SPD, deviations: Tensor) -> None:
    S.check_event(deviations, "deviations")
    check_nonempty(deviations, "deviations")
    check_finite(deviations, "deviations")
