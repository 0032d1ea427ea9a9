"""Pieces of random optimizers whose steps keep more than numbers: see fuzz_pieces.py.

A tensor, a group or a state under two names; what a step writes to its class; iterators
that it keeps or leaves half-way; arrays and numbers of numpy's; closures. And objects
that a user hangs on an optimizer between two steps, and takes off again.
"""

from __future__ import annotations

#: Steps that keep such things, one piece each.
KEEPING = """
== a tensor under two names of the state
lane:
    if "u$k" not in state:
        state["u$k"] = state["w$k"] = torch.zeros_like(p)
    state["u$k"].add_(grad)
    upd = upd + state["w$k"] * 0.25
event: opt.state[ps[$j]]["w$k"] = torch.zeros_like(ps[$j].detach())
event: opt.state[ps[$j]]["u$k"] = opt.state[ps[$j]]["w$k"].clone()
== a tensor in a group and in the state
lane:
    if "g$k" not in state:
        state["g$k"] = torch.zeros_like(p)
        group.setdefault("held$k", {})[i] = state["g$k"]
    group["held$k"][i].add_(grad, alpha=0.5)
    upd = upd + state["g$k"]
event: opt.param_groups[0]["held$k"][0] = torch.zeros_like(ps[0].detach())
== one tensor in two states
setup:
    opt.state[ps[0]]["both$k"] = opt.state[ps[-1]]["both$k"] = torch.zeros(3)
lane:
    if "both$k" in state:
        state["both$k"].add_(1)
        rate = rate * 0.5
event: opt.state[ps[0]]["both$k"] = torch.ones(3)
== a view of the parameter in the state
lane:
    if "view$k" not in state:
        state["view$k"] = p.detach().view(-1)
    upd = upd + state["view$k"].view_as(p) * 0.125
event: opt.state[ps[$j]]["view$k"] = ps[$j].detach().view(-1).clone()
== a group in an attribute
init: self.first$k = self.param_groups[0]
step: self.first$k["n$k"] = self.first$k.get("n$k", 0) + 1
lane: rate = rate / (1 + group.get("n$k", 0))
event: opt.first$k = opt.param_groups[-1]
event: opt.first$k = dict(opt.first$k)
== the groups in an attribute
init: self.every$k = self.param_groups
step:
    for own in self.every$k:
        own["e$k"] = own.get("e$k", 1.0) * 0.5
lane: rate = rate * group["e$k"]
event: opt.every$k = list(opt.every$k)
== a state in an attribute
setup: opt.one$k = opt.state[ps[$j]]
step: self.one$k["c$k"] = self.one$k.get("c$k", 0) + 1
lane: rate = rate / (1 + state.get("c$k", 0))
event: opt.one$k = {}
== the states in an attribute
setup: opt.states$k = opt.state
lane:
    self.states$k[p]["z$k"] = self.states$k[p].get("z$k", 0) + 1
    rate = rate / state["z$k"]
event: opt.states$k[ps[$j]]["z$k"] = 7
== the parameters in an attribute
setup: opt.own$k = list(ps)
step:
    for n, p in enumerate(self.own$k):
        self.state[p]["at$k"] = n
lane: rate = rate / (1 + state.get("at$k", 0) % 3)
event: opt.own$k.reverse()
== the class counts
class: ran$k = 0
step:
    type(self).ran$k += 1
lane: rate = rate / self.ran$k
event: opt.ran$k = 3
== the class counts by name
class: ran$k = 0
step:
    Drawn.ran$k = Drawn.ran$k + 1
lane: rate = rate / (1 + self.ran$k)
== the base counts
step:
    Base.told$k = getattr(Base, "told$k", 0) + 1
lane: rate = rate / self.told$k
== a table of the class
step:
    self.looked["t$k"] = self.looked.get("t$k", 0.5) * 0.5
lane: rate = rate * self.looked["t$k"]
event: type(opt).looked["t$k"] = $y
== a method of the class counts
class:
    met$k = 1
    @classmethod
    def meet$k(cls):
        cls.met$k += 1
        return cls.met$k
lane: rate = rate / self.meet$k()
== an iterator of numbers
init: self.it$k = iter(range(2, 999))
step: f$k = 1 / next(self.it$k)
lane: rate = rate * f$k
event: opt.it$k = iter(range(5, 99))
== an iterator that is made and kept
step:
    self.left$k = iter([0.5, 0.25, 0.125])
    f$k = next(self.left$k)
lane: rate = rate * f$k
event: next(opt.left$k)
== a cycle
module: import itertools
init: self.cycle$k = itertools.cycle((0.5, 1.0, 0.25))
step: f$k = next(self.cycle$k)
lane: rate = rate * f$k
== an iterator in the group
setup: opt.param_groups[0]["it$k"] = iter(range(2, 99))
group: f$k = 1 / next(group["it$k"]) if "it$k" in group else 1.0
lane: rate = rate * f$k
== a generator is left
class:
    ended$k = 0
    def part$k(self):
        try:
            yield 0.5
            yield 0.25
        finally:
            self.ended$k += 1
step:
    for f$k in self.part$k():
        break
lane: rate = rate * f$k / (1 + self.ended$k)
== a generator is used up
class:
    came$k = 0
    def whole$k(self):
        for f in (0.5, 0.25):
            self.came$k += 1
            yield f
step: f$k = sum(self.whole$k())
lane: rate = rate * f$k
== an array in an attribute
module: import numpy as np
init: self.array$k = np.full(4, 0.5)
lane: rate = rate * float(self.array$k[i % 4])
event: opt.array$k[1] = $x
event: opt.array$k = opt.array$k * 0.5
== an array that the step writes
module: import numpy as np
init: self.seen$k = np.zeros(3)
step: self.seen$k[1] += 1
lane: rate = rate / (1 + float(self.seen$k.sum()))
== an array in the group
module: import numpy as np
setup: opt.param_groups[0]["w$k"] = np.array([0.5, 1.0])
lane:
    if "w$k" in group:
        rate = rate * float(group["w$k"][i % 2])
event: opt.param_groups[0]["w$k"][0] = $y
== an array in the state
module: import numpy as np
lane:
    if "h$k" not in state:
        state["h$k"] = np.zeros(2)
    state["h$k"][0] += 1
    rate = rate / float(state["h$k"][0])
event: opt.state[ps[$j]]["h$k"][0] = 5
== a number of numpy's
module: import numpy as np
init: self.scale$k = np.float64(0.5)
lane: rate = rate * self.scale$k
event: opt.scale$k = np.float64($y)
event: opt.scale$k *= 0.5
== a whole number of numpy's
module: import numpy as np
init: self.whole$k = np.int64(1)
step: self.whole$k += 1
lane: rate = rate / int(self.whole$k)
== a closure with a number of its own
step:
    count$k = 0
    def bump$k():
        nonlocal count$k
        count$k += 1
        return count$k
lane: rate = rate / bump$k()
inline: yes
== a closure over the lane
lane:
    def scaled$k(x, by=rate):
        return x * by * 0.5
    upd = upd + scaled$k(grad)
== a closure that is kept
step:
    def told$k(x, by=len(self.param_groups)):
        return x / (1 + by)
    self.kept$k = told$k
lane: rate = self.kept$k(rate)
event: opt.kept$k = float
== closures in a list
step: every$k = [lambda x, by=by: x * by for by in (0.5, 0.25)]
lane: rate = every$k[i % 2](rate)
"""

#: What users hang on an optimizer, or take off.
HUNG = """
opt.hung = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5 ** n)
opt.hung = torch.nn.PReLU(2)
opt.hung = {"a": [1, 2], "b": {"c": ps[$j]}}
opt.hung = [opt.param_groups[0], opt.state]
opt.hung = opt.state.get(ps[$j])
opt.hung = (p for p in ps)
opt.hung = iter(ps)
opt.hung = lambda: opt
opt.hung = opt.step
opt.hung = type("Hung", (), {"n": 1})()
opt.hung = set(ps[:2])
opt.hung = ps[$j].detach()
opt.hung = __import__("numpy").ones(3)
opt.hung = __import__("collections").deque([1, 2], maxlen=2)
opt.hung = __import__("threading").Lock()
opt.hung = __import__("weakref").ref(ps[$j])
opt.__dict__.pop("hung", None)
opt.param_groups[0]["hung"] = [1, 2]
opt.param_groups[0]["hung"] = opt
opt.param_groups[0]["hung"] = ps[$j]
opt.param_groups[0].pop("hung", None)
opt.state[ps[$j]]["hung"] = {"n": 1}
opt.state[ps[$j]]["hung"] = ps[0]
opt.state[ps[$j]].pop("hung", None)
opt.defaults["hung"] = 1
type(opt).hung = 3
""".strip().splitlines()
