"""What the optimizers of tests/numerics/fuzz_optimizers.py are put together from.

A piece is a few lines of a step and what they need elsewhere. Its sections:

    module:  before the class          class:  in it (methods, attributes)
    init:    in __init__, after super  step:   before the loop over groups
    group:   in that loop              lane:   for each parameter; may change `rate`, a
    end:     after the loops                   Python float, and `upd`, a tensor
    setup:   once, with `opt`, `ps`    event:  what a user does between two steps

In a lane: self, g, group, i (in its group), p, grad, state, rate, upd. `SKIP` leaves
the lane; a piece with a section `inline:` has a lane that must stand in the loop.
`$k` is the piece's own number, `$x` one of NUMBERS and `$y` one near 1, other ones at
each place, `$j` a lane of all and `$i` a place in a group, one for each line, `$n` how
many lanes there are, `$t` from 1 to 3.
"""

from __future__ import annotations

import re

from tests.numerics.fuzz_aliases import HUNG, KEEPING

NUMBERS = (0.5, 2.0, 0.25, 1.5, 3.0, -1.0, 0.0, 1.25)
NEAR_ONE = (1.0, 1.0, 1.0, 0.5, 2.0, 1.25)

#: What any optimizer does: lanes that are alike stay alike.
HARMLESS = """
== momentum
lane:
    if "m$k" not in state:
        state["m$k"] = torch.zeros_like(p)
    state["m$k"].mul_(0.9).add_(upd, alpha=0.1)
    upd = state["m$k"]
== momentum that is made anew
lane:
    old$k = state.get("m$k")
    state["m$k"] = upd.clone() if old$k is None else old$k * 0.75 + upd
    upd = state["m$k"]
== second moment
lane:
    if not isinstance(state.get("v$k"), torch.Tensor):
        state["v$k"] = torch.zeros_like(p)
    state["v$k"].mul_(group["beta"]).addcmul_(grad, grad, value=1 - group["beta"])
    upd = upd / state["v$k"].sqrt().add_(1e-3)
== weight decay
lane:
    upd = upd.add(p, alpha=group["decay"])
event: opt.param_groups[0]["decay"] = $x
event: opt.param_groups[-1]["decay"] = $x
== decoupled decay
lane:
    if group["decay"] != 0:
        p.mul_(1 - rate * group["decay"])
event: opt.param_groups[0]["decay"] = 0.01
== sign
lane: upd = upd.sign()
== clamp
lane: upd = upd.clamp(-$t, $t)
== maximize
lane: upd = -upd if group["maximize"] else upd
event: opt.param_groups[0]["maximize"] = True
== warm-up
lane: rate = rate * min(1.0, group["beta"] * $t)
event: opt.param_groups[0]["beta"] = 0.25
== a tensor counts steps
lane:
    if len(state) == 0:
        state["t$k"] = torch.zeros(())
    if "t$k" in state:
        state["t$k"] += 1
        upd = upd / state["t$k"]
== own norm
lane: upd = upd / (1 + grad.norm())
== trust ratio
lane:
    w$k, u$k = p.norm(), upd.norm()
    upd = upd * torch.where(u$k > 0, w$k / (u$k + 0.125), 1.0)
== nesterov
lane: upd = upd.add(grad, alpha=0.5)
== step of the optimizer
init: self.t$k = 0
step: self.t$k += 1
lane: rate = rate / self.t$k
== step of the group
group: group["t$k"] = group.get("t$k", 0) + 1
lane: rate = rate / group["t$k"] ** 0.5
"""

#: Numbers that come by many ways, and a user who changes one of them.
NUMBERS_FROM = """
== a number of the group
lane: rate *= group.get("scale$k", 1.0)
event: opt.param_groups[0]["scale$k"] = $x
event: opt.param_groups[-1]["scale$k"] = $x
== a list in the group
setup:
    for own in opt.param_groups:
        own["table$k"] = [1.0] * len(own["params"])
lane: rate *= group["table$k"][i] if i < len(group["table$k"]) else 1.0
event: opt.param_groups[0]["table$k"][$i] = $x
== an attribute
init: self.scale$k = $y
lane: rate *= self.scale$k
event: opt.scale$k = $x
== an attribute of the class
class: factor$k = $y
lane: rate *= self.factor$k
event: type(opt).factor$k = $x
== a class attribute by the class
class: boost$k = {}
lane: rate *= type(self).boost$k.get(i, 1.0)
event: type(opt).boost$k[$i] = $x
== a global
module: RATE$k = $y
lane: rate *= RATE$k
event: globals()["RATE$k"] = $x
== a global table by place
module: TABLE$k = [1.0] * $n
lane: rate *= TABLE$k[i]
event: TABLE$k[$i] = $x
== a table of the optimizer by place
init: self.table$k = [$y] * $n
lane: rate *= self.table$k[i]
event: opt.table$k[$i] = $x
event: opt.table$k = [$x] * $n
== a table by group and place
init: self.grid$k = {}
lane: rate *= self.grid$k.get((g, i), $y)
event: opt.grid$k[(0, $i)] = $x
== a table by shape
module: SHAPES$k = {}
lane: rate *= SHAPES$k.get(tuple(p.shape), 1.0)
event: SHAPES$k[tuple(ps[$j].shape)] = $x
== a shape in a set
init: self.shapes$k = set()
lane:
    if p.shape in self.shapes$k:
        upd = upd * $x
event: opt.shapes$k.add(ps[$j].shape)
== a number of dimensions
init: self.dims$k = [1.0] * 6
lane: rate *= self.dims$k[p.dim()]
event: opt.dims$k[ps[$j].dim()] = $x
== a threshold of sizes
module: LARGE$k = 10**9
lane:
    if p.numel() > LARGE$k:
        rate *= $x
event: globals()["LARGE$k"] = ps[$j].numel() - 1
== a dtype
init: self.kinds$k = {torch.float32: $y}
lane: rate *= self.kinds$k.get(p.dtype, 1.0)
event: opt.kinds$k[ps[$j].dtype] = $x
== a set of identities
init: self.slow$k = set()
lane:
    if id(p) in self.slow$k:
        rate *= $x
event: opt.slow$k.add(id(ps[$j]))
== a table by identity
module: BY_ID$k = {}
lane: rate *= BY_ID$k.get(id(p), 1.0)
event: BY_ID$k[id(ps[$j])] = $x
== a table by identity, full
setup: opt.scales$k = {id(p): $y for p in ps}
lane: rate *= self.scales$k.get(id(p), 1.0)
event: opt.scales$k[id(ps[$j])] = $x
== a table by parameter
init: self.own$k = {}
lane:
    if p in self.own$k:
        rate = rate * self.own$k[p]
event: opt.own$k[ps[$j]] = $x
== names
init: self.names$k = ["block.%d.weight" % n for n in range($n)]
lane:
    if self.names$k[i].endswith("bias"):
        rate *= $x
event: opt.names$k[$i] = "block.bias"
== names that are made
lane: rate *= getattr(self, f"scale$k_{i}", 1.0)
event: opt.scale$k_$i = $x
== names of the optimizer's own dict
lane: rate *= self.__dict__.get("wide$k_%d" % i, 1.0)
event: vars(opt)["wide$k_$i"] = $x
== an attribute of the parameter
lane: rate *= getattr(p, "scale$k", 1.0)
event: ps[$j].scale$k = $x
== an attribute that all parameters have
setup:
    for p in ps:
        p.scale$k = $y
lane: rate *= p.scale$k
event: ps[$j].scale$k = $x
== has the parameter an attribute
lane:
    if not hasattr(p, "still$k"):
        upd = upd.add(p, alpha=0.25)
event: ps[$j].still$k = True
== vars of the parameter
lane: rate *= vars(p).get("scale$k", 1.0)
event: ps[$j].scale$k = $x
== a tensor on the parameter
lane:
    kept$k = getattr(p, "kept$k", None)
    if kept$k is not None:
        upd = upd + kept$k
event: ps[$j].kept$k = torch.ones_like(ps[$j].detach())
== a tensor on each parameter
setup:
    for n, p in enumerate(ps):
        p.main$k = torch.full_like(p.detach(), 0.125 * n)
lane: upd = upd + p.main$k
event: ps[$j].main$k = torch.ones_like(ps[$j].detach())
event: ps[$j].main$k.fill_($x)
== a dict on the parameter
setup:
    for p in ps:
        p.notes$k = {"rate": 1.0}
lane: rate *= p.notes$k["rate"]
event: ps[$j].notes$k["rate"] = $x
== an object of settings
module:
    class Settings$k:
        def __init__(self):
            self.scale = [1.0] * $n
            self.limit = None
init: self.settings$k = Settings$k()
lane:
    rate *= self.settings$k.scale[i]
    if self.settings$k.limit is not None:
        rate = min(rate, self.settings$k.limit)
event: opt.settings$k.scale[$i] = $x
event: opt.settings$k.limit = 0.01
== a closure
module:
    def made$k():
        table = [1.0] * $n
        def look(n):
            return table[n]
        def put(n, value):
            table[n] = value
        return look, put
    look$k, put$k = made$k()
lane: rate *= look$k(i)
event: put$k($i, $x)
== a default
module:
    def default$k(n, table=[1.0] * $n):
        return table[n]
lane: rate *= default$k(i)
event: default$k.__defaults__[0][$i] = $x
== an attribute of a function
module:
    def shared$k(n):
        return shared$k.table.get(n, 1.0)
    shared$k.table = {}
lane: rate *= shared$k(i)
event: shared$k.table[$i] = $x
== a method
class:
    def weight$k(self, n, own):
        if n in self.odd$k:
            return own["beta"]
        return 1.0
init: self.odd$k = set()
lane: rate *= self.weight$k(i, group)
event: opt.odd$k.add($i)
== a static method
class:
    @staticmethod
    def fold$k(x, n):
        return x * $y if n % 2 else x
lane: rate = self.fold$k(rate, self.odd$k)
init: self.odd$k = 0
event: opt.odd$k = 1
== a property
class:
    @property
    def now$k(self):
        return self.inner$k[0]
init: self.inner$k = [$y]
lane: rate *= self.now$k
event: opt.inner$k[0] = $x
== an inherited method
class:
    def look$k(self, n):
        return super().look(n) * self.more$k.get(n, 1.0)
init: self.more$k = {}
lane: rate *= self.look$k(i)
event: opt.more$k[$i] = $x
event: opt.looked[$i] = $x
== a lambda in an attribute
init: self.rule$k = lambda n: 1.0
lane: rate *= self.rule$k(i)
event: opt.rule$k = lambda n: $x if n == $i else 1.0
== a partial
module:
    import functools
    def scaled$k(table, n):
        return table[n]
    LIST$k = [1.0] * $n
    partial$k = functools.partial(scaled$k, LIST$k)
lane: rate *= partial$k(i)
event: LIST$k[$i] = $x
== a tensor for all
init: self.mask$k = torch.ones(())
lane: upd = upd * self.mask$k
event: opt.mask$k.fill_($x)
event: opt.mask$k = torch.full((), $x)
== tensors in a list
setup: opt.masks$k = [torch.ones_like(p.detach()) for p in ps]
lane:
    if self.masks$k[i].shape == upd.shape and self.masks$k[i].dtype == upd.dtype:
        upd = upd * self.masks$k[i]
event: opt.masks$k[$i].mul_(0.5)
"""

#: Branches and bounds that show at some steps only.
CONTROL = """
== a bound that hides
lane: rate = min(rate, 0.1 / (i + 1))
event: opt.param_groups[0]["lr"] = $x
== a bound from below
lane: rate *= max(1, (i - 3) * self.steep$k)
init: self.steep$k = 0
event: opt.steep$k = 1
== a bound of the norm
init: self.clip$k = [10.0 ** 6] * $n
lane: upd = upd / max(1.0, grad.norm().item() / self.clip$k[i])
event: opt.clip$k[$i] = 0.5
== a bound by a table
init: self.floor$k = [0.0] * $n
lane: rate = max(rate, self.floor$k[i])
event: opt.floor$k[$i] = 0.375
== one odd lane
init: self.odd$k = -1
lane:
    if i == self.odd$k:
        rate = -rate
event: opt.odd$k = $i
== one lane is left out
init: self.left$k = ()
lane:
    if i in self.left$k:
        SKIP
event: opt.left$k = ($i,)
== a branch on the rate
lane:
    if rate > 0.2:
        upd = upd * (1 + i % 2)
event: opt.param_groups[0]["lr"] = 0.5
== a branch on the step
init: self.turn$k = 0
step: self.turn$k += 1
lane:
    if self.turn$k > $t and i % 3 == 1:
        upd = upd * 2
== a number of each lane's state
lane:
    state["n$k"] = state.get("n$k", 0) + 1
    rate = rate / state["n$k"] ** 0.5
event: opt.state[ps[$j]]["n$k"] = 40
== a branch on the state
lane:
    state["n$k"] = state.get("n$k", 0) + 1
    if state["n$k"] > $t:
        upd = upd * 0.5
event: opt.state[ps[$j]]["n$k"] = -5
event: opt.state[ps[$j]]["n$k"] = 5
== a float of the state
lane:
    state["f$k"] = state.get("f$k", 1.0) * 0.75
    rate *= state["f$k"]
event: opt.state[ps[$j]]["f$k"] = $x
== a flag of the state
lane:
    if not state.setdefault("b$k", False):
        upd = upd * 1.5
event: opt.state[ps[$j]]["b$k"] = True
== a string of the state
lane:
    if state.setdefault("kind$k", "a") == "b":
        upd = upd * 1.5
event: opt.state[ps[$j]]["kind$k"] = "b"
== a tuple of the state
lane:
    state["pair$k"] = (state.get("pair$k", (0, 1.0))[0] + 1, rate)
    rate /= state["pair$k"][0]
== a dict of the state
lane:
    inner$k = state.setdefault("inner$k", {"n": 0})
    inner$k["n"] += 1
    rate /= inner$k["n"]
event: opt.state[ps[$j]]["inner$k"] = {"n": 7}
== None in the state
lane:
    if state.setdefault("none$k", None) is not None:
        upd = upd * state["none$k"]
event: opt.state[ps[$j]]["none$k"] = 0.5
== state on the third step
lane:
    state["n$k"] = state.get("n$k", 0) + 1
    if state["n$k"] == 3:
        state["late$k"] = torch.ones_like(p)
    if "late$k" in state:
        state["late$k"].mul_(0.5)
        upd = upd + state["late$k"]
event: opt.state[ps[$j]].pop("late$k", None)
== state by a condition
lane:
    if rate < 0.06 and "slow$k" not in state:
        state["slow$k"] = p.clone()
    if "slow$k" in state:
        state["slow$k"].lerp_(p, 0.5)
        upd = upd + state["slow$k"]
event: opt.param_groups[0]["lr"] = 0.05
== state that goes
lane:
    state["n$k"] = state.get("n$k", 0) + 1
    if state["n$k"] % 2:
        state["tmp$k"] = upd.clone()
    else:
        upd = upd + state.pop("tmp$k", 0.0)
== a state tensor for the user to change
lane:
    state["s$k"] = state["s$k"] if "s$k" in state else torch.ones_like(p)
    state["s$k"].mul_(0.5)
    upd = upd * state["s$k"]
event: opt.state[ps[$j]]["s$k"] = torch.full_like(ps[$j].detach(), $x)
event: opt.state.pop(ps[$j], None)
event: opt.state[ps[$j]].get("s$k", torch.ones(1)).fill_($x)
== a KeyError
init: self.tried$k = {}
lane:
    try:
        rate *= self.tried$k[i]
    except KeyError:
        rate *= 1.0
event: opt.tried$k[$i] = $x
== an AttributeError
lane:
    try:
        upd = upd * p.try$k
    except AttributeError:
        pass
event: ps[$j].try$k = $x
== an IndexError
init: self.short$k = []
lane:
    try:
        rate *= self.short$k[i]
    except IndexError:
        pass
event: opt.short$k.append($x)
== a while loop
init: self.times$k = [1] * $n
lane:
    left$k = self.times$k[i]
    while left$k > 0:
        upd = upd * 0.5
        left$k -= 1
event: opt.times$k[$i] = 2
== for and else
init: self.marks$k = [[] for _ in range($n)]
lane:
    for mark$k in self.marks$k[i]:
        if mark$k:
            break
    else:
        rate *= 0.5
event: opt.marks$k[$i].append(1)
== a comprehension
init: self.parts$k = [1.0] * $n
lane: rate *= sum(w for n, w in enumerate(self.parts$k) if n == i)
event: opt.parts$k[$i] = $x
== any
init: self.pairs$k = [(-1, 2.0)]
lane: rate *= 2.0 if any(n == i for n, _ in self.pairs$k) else 1.0
event: opt.pairs$k.append(($i, 2.0))
== a walrus
init: self.w$k = {}
lane:
    if (found$k := self.w$k.get(i)) is not None:
        rate *= found$k
event: opt.w$k[$i] = $x
== is the gradient contiguous
lane:
    if not grad.is_contiguous():
        upd = upd * 2
event: ps[$j].grad = ps[$j].grad.t().contiguous().t()
== a flag of the parameter
lane:
    if not p.requires_grad:
        upd = upd * 2
event: ps[$j].requires_grad_(False)
event: ps[$j].requires_grad_(True)
== by the last lane
step: n$k = [len(own["params"]) for own in self.param_groups]
inline: yes
lane:
    if i == n$k[g] - 1:
        upd = upd * 2
== by the group's number
lane: rate /= 1 + g
== by the group's size
lane: rate /= len(group["params"])
== by what the state holds
lane: rate /= 1 + len(self.state)
== the first lane
lane:
    if p is group["params"][0]:
        upd = upd * 2
== one parameter
setup: opt.one$k = ps[0]
lane:
    if p is self.one$k:
        upd = upd * 2
event: opt.one$k = ps[$j]
"""

#: What goes from lane to lane, or outlives a step.
ACROSS = """
== a running sum
inline: yes
step: acc$k = 0.0
lane:
    acc$k += rate
    upd = upd * (1 + acc$k)
== a running tensor
inline: yes
step: sum$k = torch.zeros(())
lane:
    sum$k = sum$k + grad.float().norm()
    upd = upd / (1 + sum$k).to(upd.dtype)
== the lane before
inline: yes
step: last$k = None
lane:
    if last$k is not None and last$k.shape == upd.shape and last$k.dtype == upd.dtype:
        upd = upd + last$k
    last$k = grad
== the total norm
step:
    all$k = [p.grad for own in self.param_groups for p in own["params"]]
    norms$k = [x.float().norm() for x in all$k if x is not None]
    total$k = torch.stack(norms$k).norm() if norms$k else torch.zeros(())
inline: yes
lane: upd = upd / (1 + total$k).to(upd.dtype)
== a total weighed by a table
init: self.weigh$k = [0.0] * $n
step:
    own$k = zip(self.param_groups[0]["params"], self.weigh$k)
    own$k = [p.grad.float().sum() * w for p, w in own$k if p.grad is not None]
    drift$k = sum(own$k) if own$k else 0.0
inline: yes
lane: upd = upd + torch.as_tensor(drift$k, dtype=upd.dtype)
event: opt.weigh$k[$i] = 0.25
== a count of lanes
init: self.seen$k = 0
lane:
    self.seen$k += 1
    if self.seen$k % 5 == 0:
        upd = upd * 2
== a count of the class
class: all$k = 0
lane:
    type(self).all$k += 1
end: self.last$k = type(self).all$k
== a count of the module
module: COUNT$k = [0]
lane:
    COUNT$k[0] += 1
    rate *= 1 + COUNT$k[0] % 2
== a counter
module:
    import itertools
    NEXT$k = itertools.count()
lane:
    if next(NEXT$k) == 20:
        upd = upd * 3
== a count by lane
init: self.counts$k = {}
lane:
    self.counts$k[i] = self.counts$k.get(i, 0) + 1
    rate /= self.counts$k[i]
event: opt.counts$k[$i] = 9
== a log
init: self.log$k = []
lane: self.log$k.append((i, rate))
== the number of calls
class:
    def call$k(self):
        self.calls$k = getattr(self, "calls$k", 0) + 1
        return self.calls$k
step: self.call$k()
lane: rate /= self.calls$k
== a list that is used up
init: self.queue$k = [1.0] * ($n * 2) + [2.0] * 3
lane: rate *= self.queue$k.pop(0) if self.queue$k else 1.0
== a cache
init: self.cache$k = {}
lane:
    if p.shape not in self.cache$k:
        self.cache$k[p.shape] = 1.0 + len(self.cache$k)
    rate *= self.cache$k[p.shape]
== a generator
class:
    def weights$k(self):
        for n in range($n):
            yield self.gen$k.get(n, 1.0)
init: self.gen$k = {}
step: all$k = list(self.weights$k())
inline: yes
lane: rate *= all$k[i]
event: opt.gen$k[$i] = $x
== an iterator
init: self.list$k = [1.0] * $n
step: turn$k = iter(self.list$k)
inline: yes
lane: rate *= next(turn$k, 1.0)
event: opt.list$k[$i] = $x
== one state for all
lane:
    shared$k = self.state[self.param_groups[0]["params"][0]]
    shared$k["all$k"] = shared$k.get("all$k", 0) + 1
    rate /= shared$k["all$k"]
== a number read from a tensor
lane: rate *= 1.0 if grad.float().sum().item() > 0 else 0.5
== a number read once
step: first$k = self.param_groups[0]["params"][0].float().norm().item()
inline: yes
lane: rate /= 1.0 + first$k
== data of the parameter
lane: p.data.mul_(0.75)
== other data for the parameter
lane: p.data = p.data * 0.75
== other data for the gradient
lane:
    p.grad.data = p.grad.data * 0.5
    upd = p.grad
== gradients that are changed
lane: grad.mul_(0.5)
== gradients that are dropped
end:
    for own in self.param_groups:
        for p in own["params"]:
            p.grad = None
== an attribute is set on the parameter
lane:
    p.told$k = getattr(p, "told$k", 0) + 1
    rate /= p.told$k
event: ps[$j].told$k = 7
== a tensor is kept on the parameter
lane:
    if not hasattr(p, "ema$k"):
        p.ema$k = p.detach().clone()
    p.ema$k.lerp_(p.detach(), 0.25)
    upd = upd + p.ema$k
== the state is the gradient
lane:
    before$k = state.get("g$k")
    if before$k is not None:
        upd = upd + before$k
    state["g$k"] = grad
"""

#: What users do to any optimizer.
EVENTS = """
opt.param_groups[0]["lr"] = 0.03
opt.param_groups[-1]["lr"] = 0.5
opt.param_groups[0]["lr"] *= 0.5
opt.param_groups[0]["lr"] = 0.0
opt.param_groups[0]["lr"] = 2
opt.param_groups[0]["beta"] = 0.5
ps[$j].grad = None
ps[$j].grad = None; ps[$j].grad = None
ps[0].grad = None
ps[$j].grad = torch.zeros_like(ps[$j].detach())
ps[$j].grad.zero_()
ps[$j].requires_grad_(False)
ps[$j].data.mul_(0.5)
ps[$j].data = ps[$j].data.clone()
ps[$j].data = ps[$j].data + 1
opt.state.pop(ps[$j], None)
opt.state[ps[$j]].clear()
opt.load_state_dict(opt.state_dict())
opt.load_state_dict(copy.deepcopy(opt.state_dict()))
more = [new(7, (5,)), new(8, (5,))]; ps += more; opt.add_param_group({"params": more})
more = new(7, (5,)); ps.append(more); opt.param_groups[0]["params"].append(more)
opt.param_groups[0]["params"].reverse()
opt.param_groups[0]["params"].append(opt.param_groups[0]["params"].pop(0))
opt.param_groups[0]["params"].pop()
opt.param_groups[0] = dict(opt.param_groups[0])
opt.param_groups = list(opt.param_groups)
opt.zero_grad()
opt.zero_grad(set_to_none=False)
opt.state.update({p: {**s} for p, s in opt.state.items()})
opt.state[ps[$j]] = {k: v for k, v in reversed(opt.state[ps[$j]].items())}
[v.mul_(0.5) for v in opt.state[ps[$j]].values() if isinstance(v, torch.Tensor)]
opt.state[ps[$j]] = copy.deepcopy(dict(opt.state[ps[$j]]))
""".strip().splitlines()
EVENTS += HUNG

Pieces = dict[str, dict[str, list[str]]]


def read(text: str) -> Pieces:
    """The sections of each piece, by its name; an event is one entry of its list."""
    found: Pieces = {}
    for block in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = block.partition("\n")
        sections = found[name] = {}
        lines: list[str] = []
        for line in rest.rstrip().splitlines():
            head = re.match(r"(\w+):(?: (.*))?$", line)
            if head:
                lines = sections.setdefault(head[1], [])
                if head[2]:
                    lines.append(head[2])
            else:
                assert line.startswith("    "), (name, line)
                lines.append(line[4:])
    return found


PIECES = [read(x) for x in (HARMLESS, NUMBERS_FROM, CONTROL, ACROSS, KEEPING)]
ALL: Pieces = {name: piece for pieces in PIECES for name, piece in pieces.items()}
