"""A small Bayesian network on the wine data, with a Kronecker-factored posterior."""

from __future__ import annotations

import torch
from sklearn.datasets import load_wine
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, one_hot

from eigenstep.inference import Supervised, fit_gaussian, laplace


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    inputs, targets = (torch.tensor(part) for part in load_wine(return_X_y=True))
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    order = torch.randperm(len(inputs))
    train, test = order[:90], order[90:]

    net = torch.nn.Sequential(torch.nn.Linear(13, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    start = {name: parameter.detach() for name, parameter in net.named_parameters()}
    model = Supervised(
        lambda weights, x: functional_call(net, weights, x),
        cross_entropy,
        inputs[train],
        targets[train],
        prior_precision=1.0,
        outputs=3,
    )
    mode = laplace(model, start, curvature="gauss-newton", max_iter=50)
    fit = fit_gaussian(
        model,
        mode.mean,
        "kronecker",
        curvature="gauss-newton",
        tol=0.1,
        max_iter=100,
        progress=True,
    )
    print(fit.message)

    choices = {
        "the mode alone": {name: tensor[None] for name, tensor in mode.posterior.means.items()},
        "Laplace": mode.posterior.sample(500),
        "variational": fit.posterior.sample(500),
    }
    for name, weights in choices.items():
        # (draws, examples, classes)
        outputs = vmap(vmap(model.predict, (None, 0)), (0, None))(weights, inputs[test])
        chances = outputs.softmax(-1).mean(0)
        score = chances.gather(1, targets[test, None]).log().mean()
        brier = (chances - one_hot(targets[test])).square().sum(1).mean()
        print(f"{name:15} held-out log-likelihood {score:.3f}, Brier score {brier:.3f}")


if __name__ == "__main__":
    main()
