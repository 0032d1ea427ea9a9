"""What is exchanged of Triton's interpreter."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import numpy as np
import pytest

from fuseopt.runtime.triton.interpreter import _indexed, interpreting

pytest.importorskip("triton")


def test_a_number_may_be_the_bound_of_a_loop_in_triton_3_6():
    """There `int` is asked of an array of one element, which numpy refuses from 2.4
    on: no kernel with a loop ran.
    """

    class Tensor:
        handle = SimpleNamespace(data=np.array([3]))

    def plain(tensor, scope):
        scope.set_attr(tensor, "__index__", lambda self: {}["as triton 3.6"])

    scope = SimpleNamespace(set_attr=setattr)
    _indexed(plain)(Tensor, scope)
    assert operator.index(Tensor()) == 3


def test_it_is_put_back():
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor
    with interpreting():
        assert interpreter._patch_lang_tensor is not before
    assert interpreter._patch_lang_tensor is before
