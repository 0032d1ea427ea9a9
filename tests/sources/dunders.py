"""Modules whose steps meet objects that count how often their code is called."""

from __future__ import annotations

#: The method that counts, and what a step does that calls it.
USED = {
    "__len__": ("return 3", "float(len({x}))"),
    "__bool__": ("return True", "(1.0 if {x} else 2.0)"),
    "__index__": ("return 1", "[1.0, 2.0, 3.0][{x}]"),
    "__int__": ("return 2", "float(int({x}))"),
    "__float__": ("return 2.0", "float({x})"),
    "__complex__": ("return 2j", "complex({x}).imag"),
    "__iter__": ("return iter((1.0, 2.0))", "sum({x})"),
    "__reversed__": ("return iter((1.0, 2.0))", "sum(reversed({x}))"),
    "__next__": ("return 2.0", "next({x})"),
    "__contains__": ("return True", "(1.0 if 3 in {x} else 2.0)"),
    "__getitem__": ("return 2.0", "{x}[0]"),
    "__missing__": ("return 2.0", "{x}.__missing__(0)"),
    "__eq__": ("return True", "(1.0 if {x} == 3 else 2.0)"),
    "__ne__": ("return True", "(1.0 if {x} != 3 else 2.0)"),
    "__lt__": ("return True", "(1.0 if {x} < 3 else 2.0)"),
    "__hash__": ("return 3", "float(hash({x}))"),
    "__call__": ("return 2.0", "{x}()"),
    "__getattr__": ("return 2.0", "{x}.r"),
    "__getattribute__": ("return 2.0", "{x}.r"),
    "__get__": ("return 2.0", "type({x}).__get__({x}, None, None)"),
    "__str__": ("return '2'", "float(str({x}))"),
    "__repr__": ("return '2'", "float(repr({x}))"),
    "__format__": ("return '2'", "float(f'{{{x}}}')"),
    "__bytes__": ("return b'2'", "float(bytes({x})[0])"),
    "__add__": ("return 2.0", "{x} + 1"),
    "__radd__": ("return 2.0", "1 + {x}"),
    "__mul__": ("return 2.0", "{x} * 3"),
    "__rmul__": ("return 2.0", "3 * {x}"),
    "__truediv__": ("return 2.0", "{x} / 3"),
    "__pow__": ("return 2.0", "{x} ** 3"),
    "__neg__": ("return 2.0", "-{x}"),
    "__abs__": ("return 2.0", "abs({x})"),
    "__round__": ("return 2.0", "round({x})"),
    "__divmod__": ("return 2.0, 1.0", "divmod({x}, 3)[0]"),
    "__matmul__": ("return 2.0", "{x} @ 3"),
    "__dir__": ("return ['a']", "float(len(dir({x})))"),
    "__sizeof__": ("return 64", "float(sys.getsizeof({x}))"),
    "__setattr__": ("pass", "(setattr({x}, 'a', 1), 2.0)[1]"),
    "__delattr__": ("pass", "(delattr({x}, 'a'), 2.0)[1]"),
    "__setitem__": ("pass", "({x}.__setitem__(0, 1), 2.0)[1]"),
    "__copy__": ("return 2.0", "copy.copy({x})"),
    "__length_hint__": ("return 2", "float(operator.length_hint({x}))"),
    "__array__": ("return np.array(2.0)", "float(np.asarray({x}))"),
    "method": ("return 2.0", "{x}.method()"),
}
#: What nobody calls in eager, where an object is only there.
PASSIVE = [
    *(x for x in USED if x not in ("__getattribute__", "__setattr__", "method")),
    *(
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__instancecheck__",
    ),
    *("__torch_function__", "__torch_dispatch__", "__tensor_flatten__", "__set__"),
    *("__array_interface__", "__dlpack__", "__fspath__", "__enter__", "__exit__"),
    *("__del__", "__init_subclass__", "__subclasshook__", "__class_getitem__"),
]
#: Where the object is: how it is put there, and how the step reads it.
PLACES = {
    "attribute": ("self.x = X()", "self.x"),
    "group": ("self.param_groups[0]['x'] = X()", "group['x']"),
    "global": ("", "THE"),
    "class": ("type(self).x = X()", "self.x"),
    "list": ("self.x = [X()]", "self.x[0]"),
    "tuple": ("self.x = (X(),)", "self.x[0]"),
    "dict": ("self.x = dict(a=X())", "self.x['a']"),
    "defaults": ("self.defaults['x'] = X()", "self.defaults['x']"),
    "closure": ("x = X(); self.x = lambda: x", "self.x()"),
    "state": ("[self.state[p].update(x=X()) for p in params]", "self.state[p]['x']"),
}
#: Where it is and nobody reads it.
UNREAD = {
    **{name: put for name, (put, _) in PLACES.items()},
    "key": "self.x = {X(): 1.0}",
    "key-of-state": "self.state[X()] = {}",
    "key-of-states": "[self.state[p].update({X(): 1.0}) for p in params]",
    "key-of-group": "self.param_groups[0][X()] = 1.0",
    "set": "self.x = {X()}",
    "default-dict": "self.x = collections.defaultdict(X())",
    "of-parameter": "params[0].x = X()",
    "weak": "self.y = X(); self.x = weakref.ref(self.y)",
    "partial": "self.x = functools.partial(float, X())",
    "hook": "self.register_step_pre_hook(lambda *_, x=X(): None)",
}

FRAME = '''\
"""Counts {name}."""
import collections, copy, functools, operator, sys, weakref
import numpy as np
import torch
from torch.optim import Optimizer

_COUNTS = collections.Counter()

def counting(name, what):
    def count(self, *args, **kwargs):
        _COUNTS[name] += 1
        return what(self, *args, **kwargs)
    return count

class X({base}):
{methods}

THE = X()

class Drawn(Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.125))
        self.scales = {{1: 2.0, 2: 3.0}}
        {put}

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        p = group["params"][0]
{body}

def _before(opt, turn):
    pass

_begin = _before

def _left(opt):
    return dict(_COUNTS)

def _build(lanes, dtype):
    ps = []
    for n in range(lanes):
        drawn = torch.Generator().manual_seed(n)
        ps.append(torch.nn.Parameter(torch.randn((5,), generator=drawn, dtype=dtype)))
    opt = Drawn(ps)
    _COUNTS.clear()
    return ps, opt
'''
EACH = """\
        for group in self.param_groups:
            for p in group["params"]:
                r = {read}
                p.add_(p.grad, alpha=-group["lr"] * r)
"""
ONCE = """\
        r = {read}
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * r)
"""
#: A table and a state beside it, which an analysis goes through.
BESIDE = """\
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                r = self.scales[p.ndim] / state["n"]
                p.add_(p.grad, alpha=-group["lr"] * r)
"""


def _method(name: str, body: str) -> str:
    text = f"    def {name}(self, *args, **kwargs):\n        _COUNTS[{name!r}] += 1\n"
    if name in ("__instancecheck__", "__subclasshook__", "__init_subclass__"):
        text = text.replace("(self", "(cls")
    if name in ("__subclasshook__", "__init_subclass__", "__class_getitem__"):
        text = "    @classmethod\n" + text
    return f"{text}        {body}\n"


def used(name: str, place: str, each: bool) -> str:
    """A step that calls the method of an object."""
    returned, read = USED[name]
    put, at = PLACES[place]
    methods = _method(name, returned)
    if name == "__next__":
        methods += "    def __iter__(self): return self\n"
    if name == "__eq__":
        methods += "    __hash__ = object.__hash__\n"
    body = (EACH if each else ONCE).format(read=read.format(x=at))
    return FRAME.format(
        name=name, base="", methods=methods, put=put or "pass", body=body
    )


def unread(place: str, names: list[str]) -> str:
    """A step beside which an object is that counts any call of these methods."""
    returned = {
        "__eq__": "return self is args[0]",
        "__ne__": "return self is not args[0]",
        "__hash__": "return id(self) >> 4",
        "__getattr__": "raise AttributeError(args[0])",
        "__getattribute__": "return object.__getattribute__(self, *args)",
        "__reduce_ex__": "return object.__reduce_ex__(self, *args)",
        "__torch_function__": "return NotImplemented",
        "__subclasshook__": "return NotImplemented",
        "__dir__": "return []",
    }
    methods = "".join(
        _method(x, returned.get(x, USED.get(x, ("return None",))[0])) for x in names
    )
    put = UNREAD[place]
    return FRAME.format(
        name=place, base="", methods=methods, put=put or "pass", body=BESIDE
    )
