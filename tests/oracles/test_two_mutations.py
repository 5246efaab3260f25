"""Two mistakes in the default path that comparisons with other methods did not notice: each oracle
must.
"""

import inspect
from typing import Any

import pytest

from eigenstep.core import step
from eigenstep.optim import kernel

from .comparison import assert_same

MISTAKES: dict[str, tuple[Any, str, str, str]] = {
    "sign of the quadratic map": (
        step,
        "quadratic",
        "addcmul_(generator, tilted",
        "addcmul_(-generator, tilted",
    ),
    "half the rate of corrected eigenvalues": (
        kernel,
        "_learn",
        'if "second_moment" in state:\n',
        'if "second_moment" in state:\n        rate = rate / 2\n',
    ),
}


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (9, 3), (2, 3, 2), (3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_is_noticed(mistake: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, right, wrong = MISTAKES[mistake]
    source = inspect.getsource(getattr(module, name))
    assert source.count(right) == 1
    namespace = dict(vars(module))
    exec(source.replace(right, wrong), namespace)
    assert_same(shape)
    monkeypatch.setattr(kernel, name, namespace[name])
    with pytest.raises(AssertionError, match="relative differences"):
        assert_same(shape)
