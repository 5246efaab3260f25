"""Two mistakes in the default path that comparisons with other methods did not notice: each oracle
must.
"""

import inspect
import textwrap
from typing import Any

import pytest

from eigenstep.core import step
from eigenstep.optim.matrix import Matrices

from .comparison import assert_same

MISTAKES: dict[str, tuple[Any, str, str, str]] = {
    "sign of the quadratic map": (
        step,
        "quadratic",
        "addcmul_(generator, tilted",
        "addcmul_(-generator, tilted",
    ),
    "half the rate of corrected eigenvalues": (
        Matrices,
        "learn_second_moment_",
        "shrink = (-growth).exp()",
        "shrink, rate = (-growth).exp(), rate / 2",
    ),
}


@pytest.mark.parametrize("shape", [(5, 3), (9, 3), (3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_is_noticed(mistake: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, right, wrong = MISTAKES[mistake]
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1
    namespace = dict(vars(inspect.getmodule(function)))
    exec(source.replace(right, wrong), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    if name in step.ORTHOGONAL:
        monkeypatch.setitem(step.ORTHOGONAL, name, namespace[name])
    with pytest.raises(AssertionError, match="relative differences"):
        assert_same(shape)
