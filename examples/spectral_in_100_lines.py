"""The default step of ``Spectral`` for one matrix ``W`` whose sides are not cut, with torch alone.

The curvature is ``S = alpha C x K``. Each side is ``B Diag(d) B^T``, with ``d`` of product one.
"""

import torch
from torch import Tensor


class SpectralMatrix:
    def __init__(self, W: Tensor, lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        self.W = W  # (n, m), changed in place
        self.lr = lr
        self.weight_decay = weight_decay
        self.t = 0  # steps taken
        self.turns = 0  # how often the bases turned
        self.alpha = torch.zeros(()).to(W)  # zero before the first gradient
        self.bases = [torch.eye(n).to(W) for n in W.shape]  # B_C (n, n) and B_K (m, m)
        self.eigs = [torch.ones(n).to(W) for n in W.shape]  # d_C (n,) and d_K (m,)
        self.M = torch.zeros_like(W)  # momentum in the eigenbasis
        self.D = torch.zeros_like(W)  # mean of G^2 / alpha, the corrected eigenvalues
        self.gain = torch.ones(()).to(W)  # by how much faster steps could descend than Adam's
        self.agreement = torch.zeros(()).to(W)  # of gradients with the momentum, -1 to 1

    def step(self, gradient: Tensor) -> None:
        """Learn from a gradient ``(n, m)``, and move the weights."""
        turn = self.t % min(2, 1 + self.t // 100) == 0  # always, later every second time
        self.t += 1
        self.turns += turn
        w2 = newest_weight(0.95, self.t)
        B_C, B_K = self.bases
        G = B_C.T @ gradient @ B_K  # into the eigenbasis
        if G.any():
            total = G.abs().sum()
            self.gain.lerp_((gradient.abs().sum() / total).clamp_min(1.0), w2)
            self.agreement.lerp_((self.M.sign() * G).sum() / total, w2)
        trust = ((0.6 + self.agreement) / 0.5).clamp(0.0, 1.0)  # less where gradients swing
        self.M.lerp_(G, newest_weight(0.9, self.t) * (1 + trust) / 2)
        averages = self.learn(G, w2)
        step = torch.zeros_like(G)
        if self.alpha > 0:  # there was a gradient
            root = (self.alpha * self.D).sqrt()  # eigenvalues of S^(1/2), (n, m)
            X = self.lengthened(self.M.lerp(G, 0.2 * trust) / root, root)
            step = B_C @ X @ B_K.T  # back again
            step /= step.square().mean().sqrt().clamp_min(1.0)  # bases may stretch it a little
            if turn:
                self.turn([rotation(A) for A in averages])
        self.W -= self.lr * (step + self.weight_decay * self.W)

    def learn(self, G: Tensor, w2: float) -> list[Tensor]:
        """Learn ``d``, ``alpha`` and ``D``; return the average ``A`` of each side."""
        d_C, d_K = self.eigs
        self.alpha = torch.where(self.alpha > 0, self.alpha, G.square().mean())
        alpha = torch.where(self.alpha > 0, self.alpha, 1.0)
        damping = 1e-10 * d_C.mean() * d_K.mean()  # relative to the mean eigenvalue of C x K
        W_C = (G / d_K) @ G.T / (alpha * G.shape[1])  # (n, n)
        W_K = (G.T / d_C) @ G / (alpha * G.shape[0])  # (m, m)
        w = newest_weight(0.9, self.turns)
        averages = [d_C.diag().lerp(W_C, w), d_K.diag().lerp(W_K, w)]
        log_C = d_C.lerp(W_C.diag() + damping * d_K.reciprocal().mean(), w2).log()
        log_K = d_K.lerp(W_K.diag() + damping * d_C.reciprocal().mean(), w2).log()
        self.eigs = [(log_C - log_C.mean()).exp(), (log_K - log_K.mean()).exp()]  # product one
        growth = ((log_C.mean() + log_K.mean()) / 2).exp()  # alpha takes the rest
        self.D = self.D.lerp(G.square() / alpha + damping, w2) / growth
        self.alpha = self.alpha * growth
        return averages

    def lengthened(self, X: Tensor, root: Tensor) -> Tensor:
        """Return a step with even rows and columns, as fast as Adam's, of a size of at most 1."""
        size = X.square().mean().sqrt()
        share = (X / size).square()
        even = X / (share.mean(1, keepdim=True) + 0.1).sqrt()
        even /= (share.mean(0, keepdim=True) + 0.1).sqrt()
        longest = (3 * self.M.norm() / root.norm()).clamp_max(1.0)
        longer = torch.minimum(self.gain, (longest / size).clamp_min(1.0))
        return even * X.norm() / even.norm() * torch.minimum(longer, 1 / size)

    def turn(self, rotations: list[Tensor]) -> None:
        """Turn the bases, ``B <- B Q``, and the momentum with them."""
        self.bases = [B @ Q for B, Q in zip(self.bases, rotations, strict=True)]
        if self.t <= 100 or self.turns % 2 == 0:  # Newton-Schulz: orthogonal again
            self.bases = [1.5 * B - 0.5 * B @ B.T @ B for B in self.bases]
        self.M = rotations[0].T @ self.M @ rotations[1]
        self.D = self.D.maximum(self.M.square() / self.alpha)  # else steps could be of any size


def rotation(A: Tensor) -> Tensor:
    """Return ``Q`` that turns a basis towards the eigenvectors of ``A``."""
    delta = A.diag()[:, None] - A.diag()
    r = (A - A.diag().diag()).square().sum(1)  # of each row, off the diagonal
    sign = torch.where(delta == 0, 2 * torch.ones_like(A).triu() - 1, delta.sign())
    N = -A * sign / (delta.abs() + (delta.square() + 2 * (r[:, None] + r)).sqrt())
    N.fill_diagonal_(0.0).nan_to_num_(0.0)  # 0 / 0 where nothing is left to turn
    N *= (0.5 / (N @ N).norm().sqrt()).clamp_max(1.0)  # quadratic maps are for small turns
    c = (1 - (N @ N).square().sum() / N.square().sum()).sqrt().nan_to_num(1.0)
    return torch.eye(len(A)).to(A) + 2 * c * N + 2 * N @ N


def newest_weight(beta: float, t: int) -> float:
    return (1 - beta) / (1 - beta**t)  # of a running average, with Adam's bias correction
