"""Four processes: two stages of a pipeline, each of two processes that share experts
and the rows of dense weights, and have replicas of norms' weights.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fuseopt
from fuseopt.errors import UnsupportedInput

STAGES, WIDTH = 2, 2


def gradient(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole gradient of a weight, the same in every process."""
    torch.manual_seed(sum(map(ord, name)))
    return torch.randn(shape) * (1 + len(name))


def distinct() -> list[torch.Tensor]:
    """Each gradient of the model once, as a single process has them."""
    found = []
    for stage in range(STAGES):
        found.append(gradient(f"dense{stage}", (6, 5)))
        found.append(gradient(f"norm{stage}", (5,)))
        found += [gradient(f"expert{stage}.{e}", (4, 7)) for e in range(WIDTH)]
    return found


class Here:
    """What this process has, and its groups."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self.stage, place = divmod(rank, WIDTH)
        pairs = [dist.new_group([2 * s, 2 * s + 1]) for s in range(STAGES)]
        across = [dist.new_group([w, 2 + w]) for w in range(WIDTH)]
        self.peers, self.pipeline = pairs[self.stage], across[place]
        grads = {
            "dense": gradient(f"dense{self.stage}", (6, 5)).chunk(WIDTH)[place],
            "norm": gradient(f"norm{self.stage}", (5,)),
            "expert": gradient(f"expert{self.stage}.{place}", (4, 7)),
        }
        torch.manual_seed(rank)
        self.params = {
            k: torch.nn.Parameter(torch.randn_like(g)) for k, g in grads.items()
        }
        self.grads = grads
        self.give()

    def give(self) -> None:
        """Fresh gradients."""
        for name, p in self.params.items():
            p.grad = self.grads[name].clone()

    @property
    def groups(self) -> list[fuseopt.NormGroup]:
        """As a user declares them."""
        of = self.params
        return [
            fuseopt.NormGroup([of["dense"]], [self.peers, self.pipeline], "dense"),
            fuseopt.NormGroup([of["expert"]], [None, self.peers, self.pipeline], "ep"),
            fuseopt.NormGroup([of["norm"]], [self.pipeline], "replicated"),
        ]

    @property
    def every(self) -> list[torch.nn.Parameter]:
        """All parameters here."""
        return [*self.params.values()]


def of_all(norm: torch.Tensor, norm_type: float) -> float:
    """A norm that all processes have in common, as close as promised to a single
    process's.
    """
    every = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(every, norm)
    assert all(torch.equal(x, every[0]) for x in every)
    flat = torch.cat([g.flatten() for g in distinct()]).double()
    exact = torch.linalg.vector_norm(flat, norm_type).item()
    assert abs(norm.item() / exact - 1) <= 2**-22
    assert not math.isnan(exact)
    return exact


def round_of(here: Here | Spread, limit: float, kind: float) -> torch.Tensor:
    """Give gradients and clip them, without a warning; the norm, which is checked."""
    here.give()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = fuseopt.clip_grad_norm_(here.every, limit, kind, norm_groups=here.groups)
    of_all(norm, kind)
    return norm


def clipped(norm_type: str = "2") -> None:
    """`clip_grad_norm_` in three rounds; the gradients are those of torch's scaling."""
    here, kind = Here(), float(norm_type)
    for turn in range(3):
        norm = round_of(here, 0.5 + turn, kind)
        got = [p.grad.clone() for p in here.every]
        here.give()
        torch.nn.utils.clip_grads_with_norm_(here.every, 0.5 + turn, norm)
        assert all(torch.equal(g, p.grad) for g, p in zip(got, here.every, strict=True))


def tailed() -> None:
    """A tail with AdamW: the norm in one launch, the rest in another."""
    here, twin = Here(), Here()
    opt, plain = (torch.optim.AdamW(x.every, lr=0.1) for x in (here, twin))
    tail = fuseopt.tail(
        opt, clip_grad_norm=0.5, norm_groups=here.groups, zero_grad=True, grad_divisor=2
    )
    for turn in range(4):
        here.give(), twin.give()
        if turn == 2:
            here.params["expert"].grad = twin.params["expert"].grad = None
        first = len(fuseopt.reports())
        out = tail()
        reports = [r for r in fuseopt.reports()[first:] if r.fallback]
        assert not reports, [str(r) for r in reports]
        if turn != 2:
            of_all(out.norm * 2, 2.0)
        grads = [p.grad for p in twin.every if p.grad is not None]
        torch._foreach_div_(grads, 2)
        torch.nn.utils.clip_grads_with_norm_(twin.every, 0.5, out.norm)
        plain.step()
        for a, b in zip(here.every, twin.every, strict=True):
            assert torch.equal(a, b)
            assert a.grad is None


def wrong() -> None:
    """Replicas that are declared as parts are told; so are forgotten parameters."""
    here = Here()
    bad = [
        fuseopt.NormGroup(here.every[:1], [here.peers, here.pipeline], "dense"),
        fuseopt.NormGroup(here.every[2:], [here.peers, here.pipeline]),
        fuseopt.NormGroup(here.every[1:2], [here.peers, here.pipeline], "norms"),
    ]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            here.give()
            fuseopt.clip_grad_norm_(here.every, 1.0, norm_groups=bad)
    texts = [str(w.message) for w in told if "fuseopt" in str(w.message)]
    assert len(texts) == 1, texts
    assert "norm group 'norms' has the same norm in all 2 processes" in texts[0]
    for what, groups in (("is in no norm group", bad[1:]), ("and again in", bad + bad)):
        with pytest.raises(ValueError, match=what):
            fuseopt.clip_grad_norm_(here.every, 1.0, norm_groups=groups)
    opt = torch.optim.SGD(here.every, lr=0.1)
    tail = fuseopt.tail(
        opt, clip_grad_norm=1.0, norm_groups=here.groups, skip_nonfinite=True
    )
    with pytest.raises(ValueError, match="exclude each other"):
        tail()


class Spread(Here):
    """The same with DTensors: rows of dense weights, and replicas, lie over a mesh of
    the stage. Experts stay plain tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        names = ("stage", "rows")
        mesh = init_device_mesh("cpu", (STAGES, WIDTH), mesh_dim_names=names)["rows"]
        whole = {k: gradient(f"{k}{self.stage}", s) for k, s in WHOLES.items()}
        self.grads |= {
            k: distribute_tensor(whole[k], mesh, [place])
            for k, place in (("dense", Shard(0)), ("norm", Replicate()))
        }
        for name, g in self.grads.items():
            self.params[name] = torch.nn.Parameter(torch.ones_like(g))
        self.give()

    @property
    def groups(self) -> list[fuseopt.NormGroup]:
        """A DTensor's own mesh is not declared."""
        of = self.params
        return [
            fuseopt.NormGroup([of["dense"], of["norm"]], [self.pipeline], "DTensors"),
            fuseopt.NormGroup([of["expert"]], [self.peers, self.pipeline], "ep"),
        ]


WHOLES = {"dense": (6, 5), "norm": (5,)}


def spread(norm_type: str = "2") -> None:
    """`clip_grad_norm_` of DTensors beside plain tensors."""
    here, kind = Spread(), float(norm_type)
    for turn in range(3):
        norm = round_of(here, 0.5 + turn, kind)
        got = [p.grad for p in here.every]
        here.give()
        for g, p in zip(got, here.every, strict=True):
            torch.nn.utils.clip_grads_with_norm_([p], 0.5 + turn, norm)
            assert type(g) is type(p.grad)
            same, want = (getattr(x, "_local_tensor", x) for x in (g, p.grad))
            assert torch.equal(same, want)


def spread_refused() -> None:
    """A tail refuses DTensors by name, wherever they are, before a collective; so does
    a group of both kinds.
    """
    here = Spread()
    with pytest.raises(ValueError, match="norm group 'all' has DTensors and plain"):
        fuseopt.NormGroup(here.every, [here.pipeline], "all")
    for names in (["dense", "norm"], ["dense", "expert"], ["expert", "norm"]):
        params = [here.params[k] for k in names]
        groups = [fuseopt.NormGroup([p], [here.pipeline]) for p in params]
        before = [getattr(p, "_local_tensor", p).detach().clone() for p in params]
        for limit in (1.0, None):
            opt = torch.optim.SGD(params, lr=0.1)
            tail = fuseopt.tail(opt, clip_grad_norm=limit, norm_groups=groups)
            with pytest.raises(UnsupportedInput, match="no norm_groups for DTensors"):
                tail()
        for p, x in zip(params, before, strict=True):
            assert torch.equal(getattr(p, "_local_tensor", p), x)
